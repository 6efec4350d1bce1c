"""Does an SSH server answer where a host is said to be? Terraform gives the host as JSON in INPUT.

Behind a jump host only that one can be tried from here; `cluster` logs in to every host before it calls Terraform.
"""

import json
import os
import socket
import sys

TIMEOUT = 10


def main() -> None:
    host = json.loads(os.environ["INPUT"])
    address, port = host["address"], host["ssh_port"]
    if host.get("jump_host"):
        address, _, given = host["jump_host"].rpartition("@")[2].partition(":")
        port = int(given or 22)
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT) as connection:
            connection.settimeout(TIMEOUT)
            if connection.recv(4) != b"SSH-":
                sys.exit(f"host {host['name']}: what answers on {address}:{port} is not SSH")
    except OSError as error:
        sys.exit(f"host {host['name']}: no answer on {address}:{port}: {error}")


if __name__ == "__main__":
    main()
