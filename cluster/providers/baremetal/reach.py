"""Check that an SSH server answers at a host's address. Terraform passes the host as JSON in INPUT.

Behind a jump host nothing is tested: its name may be one of the SSH configuration of the user. `cluster` has logged in
to every host before it runs Terraform.
"""

import json
import os
import sys

from cluster.providers.ssh_server import is_ssh

TIMEOUT = 10


def main() -> None:
    host = json.loads(os.environ["INPUT"])
    address, port = host["address"], host["ssh_port"]
    if host.get("jump_host"):
        return
    try:
        if not is_ssh(address, port, TIMEOUT):
            sys.exit(f"host {host['name']}: the server on {address}:{port} does not speak SSH")
    except OSError as error:
        sys.exit(f"host {host['name']}: no answer on {address}:{port}: {error}")


if __name__ == "__main__":
    main()
