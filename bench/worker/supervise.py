"""Run a launcher on the head. End it and its ranks when the controller goes away (standard input closes)."""

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
        for signal_number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 1)):
            try:
                os.killpg(child.pid, signal_number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + seconds
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        # The launcher usually ends its ranks. This ends the others, and ranks in containers, which outlive the podman
        # process that started them. The pattern matches ranks only: their command starts with the interpreter's path.
        kill = f"pkill -9 -f -- '^/[^ ]*python[^ ]* .*--launch {run}'"
        for host in hosts:
            shell = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", host] if host != hosts[0] else ["sh", "-c"]
            subprocess.run([*shell, kill], capture_output=True, check=False)

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
    # The watcher is blocked in a read. A normal exit would wait for its lock and abort.
    os._exit(code & 0xFF)
