"""Run a launcher on the head and end it, and what it started, when the controller goes away (standard input closes)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    run, hosts, argv = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        for number, pause in ((signal.SIGTERM, 3), (signal.SIGKILL, 1)):
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + pause
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        # The launcher ends its ranks; this is for the case that it could not, and for ranks in containers, which
        # outlive the podman that started them. Only a rank's command begins with its interpreter's path.
        kill = f"pkill -9 -f -- '^/[^ ]*python[^ ]* .*--launch {run}'"
        for host in hosts:
            reach = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", host] if host != hosts[0] else ["sh", "-c"]
            subprocess.run([*reach, kill], capture_output=True, check=False)

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        stop()

    threading.Thread(target=watch, daemon=True).start()

    def stop(*_: object) -> None:
        end()
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    code = child.wait()
    sys.stdout.flush()
    # The watcher still sits in a read; an ordinary exit would wait for its lock and abort.
    os._exit(code & 0xFF)
