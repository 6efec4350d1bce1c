"""Show what runs in the background on a node, apt and the compiler, while Ansible does something else there."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import DEVNULL, PIPE

from cluster.core.process import die_with_parent
from cluster.core.progress import Progress

# Prints every two seconds "apt FETCHED INSTALLED" while packages are installed, then "horovod COMPILED TOTAL MB" while
# the role horovod compiles, and "end" when its wheel is there. Each file has a rule in a build.make.
WATCH = """
cd /
while sleep 2; do
  if ls /var/tmp/horovod-build/dist/*.whl >/dev/null 2>&1; then break
  elif build=$(ls -d /var/tmp/horovod-build/build/temp*/RelWithDebInfo 2>/dev/null); then
    total=$(grep -rhc --include=build.make 'Building C' "$build" | awk '{n += $1} END {print n}')
    memory=$(ps -C cc1plus -o rss= | awk '{n += $1} END {print int(n / 1024)}')
    echo "horovod $(find "$build" -name '*.o' | wc -l) $total $memory"
  elif pgrep -x dpkg >/dev/null || ls /var/cache/apt/archives/partial/* >/dev/null 2>&1; then
    echo "apt $(ls /var/cache/apt/archives | grep -c '[.]deb$') $(ls /var/lib/dpkg/info | grep -c '[.]list$')"
  else echo idle
  fi
done
echo end
"""


@contextmanager
def shown(logins: Sequence[Sequence[str]], progress: Progress) -> Iterator[None]:
    """Show the counts while the block runs. logins: an SSH command for each node that may install and compile."""
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
            # A jump host's connection may hold the pipe open.
            thread.join(timeout=2)
        for part in ("apt", "horovod"):
            progress.now(part, "")


def read(watcher: subprocess.Popen[str], progress: Progress) -> None:
    begin, compiled = 0.0, ""
    for line in watcher.stdout or ():
        match line.split():
            case ["apt", fetched, installed]:
                progress.now("apt", f"{fetched} packages fetched, {installed} installed")
                continue
            case ["horovod", done, total, memory] if total != "0":
                begin = begin or time.monotonic()
                compiled = f"{done} of {total} files"
                # The largest file takes half a minute; its memory shows that the compiler goes on.
                progress.now("horovod", f"{compiled} compiled, compiler uses {memory} MB")
            case ["end"] if compiled:
                progress.now("horovod", "")
                progress(f"  Horovod compiled in {time.monotonic() - begin:.1f} s ({compiled})")
        progress.now("apt", "")
