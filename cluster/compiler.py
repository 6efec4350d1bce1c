"""Show how far Horovod is compiled on a node, while Ansible does something else there."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import DEVNULL, PIPE

from cluster.core.process import die_with_parent
from cluster.core.progress import Progress

# Prints "COMPILED TOTAL" every two seconds while the role horovod compiles, and "end" when its wheel is there. A file
# has a rule in a build.make.
WATCH = """
cd /
until build=$(ls -d /var/tmp/horovod-build/build/temp*/RelWithDebInfo 2>/dev/null); do sleep 1; done
while sleep 2; do
  ls /var/tmp/horovod-build/dist/*.whl >/dev/null 2>&1 && break
  total=$(grep -rhc --include=build.make 'Building C' "$build" | awk '{n += $1} END {print n}')
  echo "$(find "$build" -name '*.o' | wc -l) $total"
done
echo end
"""


@contextmanager
def shown(logins: Sequence[Sequence[str]], progress: Progress) -> Iterator[None]:
    """Show the count while the block runs. logins: an SSH command for each node that may compile."""
    watchers = [
        subprocess.Popen(
            [*login, WATCH], stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True, preexec_fn=die_with_parent
        )
        for login in logins
    ]
    threads = [threading.Thread(target=read, args=(watcher, progress), daemon=True) for watcher in watchers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()
        for thread in threads:
            thread.join()
        progress.now("horovod", "")


def read(watcher: subprocess.Popen[str], progress: Progress) -> None:
    begin, counted = 0.0, ""
    for line in watcher.stdout or ():
        done, _, total = line.strip().partition(" ")
        if line.strip() == "end" and counted:
            progress.now("horovod", "")
            progress(f"  Horovod compiled in {time.monotonic() - begin:.1f} s ({counted})")
        if done.isdigit() and total.isdigit() and int(total):
            begin = begin or time.monotonic()
            counted = f"{done} of {total} files"
            progress.now("horovod", f"{counted} compiled")
