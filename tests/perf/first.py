"""Time the first run of a new user: `make deploy bench` in a clean clone with empty caches, part by part.

    first.py [--busy] [--again] [--terminal] [--keep]

--busy runs one busy loop per core beside it. --terminal gives the commands a terminal, so that their lines are live.
--again also times a second clone on the same machine after `make destroy` in the first. Needs root: podman gets an
empty storage of its own. OS packages that are installed already stay.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

import silence  # noqa: E402

GOALS = {"first": 420, "busy": 660, "again": 240}
ENV = "first"


def empty_caches(folder: Path) -> dict[str, str]:
    """Environment variables of a machine on which nothing was run before."""
    storage = folder / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n', encoding="utf-8"
    )
    caches = {"XDG_CACHE_HOME": "cache", "UV_CACHE_DIR": "uv", "PIP_CACHE_DIR": "pip"}
    left = {name: value for name, value in os.environ.items() if name != "HOROVOD_WHEEL"}
    return left | {name: str(folder / sub) for name, sub in caches.items()} | {"CONTAINERS_STORAGE_CONF": str(storage)}


def run(clone: Path, env: dict[str, str], *words: str) -> list[tuple[float, str]]:
    """Run a command in the clone and show its output; (seconds since the start, line) of each line."""
    begin = time.monotonic()
    process = subprocess.Popen(
        words, cwd=clone, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    lines = []
    for line in process.stdout or ():
        lines.append((time.monotonic() - begin, line.rstrip()))
        print(f"{lines[-1][0]:6.1f}  {lines[-1][1]}", flush=True)
    lines.append((time.monotonic() - begin, ""))
    if process.wait():
        sys.exit(f"perf-first: {' '.join(words)} failed with exit code {process.returncode}")
    return lines


def record(clone: Path, env: dict[str, str], *words: str) -> list[tuple[float, str]]:
    """As run, in a terminal: each redraw of the live line counts as a line."""
    recording = silence.record(words, terminal=True, cwd=clone, env=env)
    if recording.returncode:
        sys.exit(
            f"perf-first: {' '.join(words)} failed with exit code {recording.returncode}: {recording.text[-2000:]}"
        )
    return [*silence.redraws(recording.parts), (recording.seconds, "")]


def heard(title: str, lines: list[tuple[float, str]], terminal: bool) -> bool:
    """Whether the output was never silent for long."""
    found = silence.problems(silence.Recording(terminal, [(at, f"{line}\n") for at, line in lines], lines[-1][0]))
    print(f"{title}: {'; '.join(found) or 'never silent'}")
    return not found


def first_report(
    clone: Path, env: dict[str, str], call: Callable[..., list[tuple[float, str]]] = run
) -> list[tuple[float, str]]:
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    shutil.copytree(clone / "inventories/local", clone / "inventories" / ENV, symlinks=True)
    file = clone / "inventories" / ENV / "group_vars/all/cluster.yml"
    file.write_text(file.read_text().replace("name: local", f"name: {ENV}").replace("10.77.", "10.84."))
    return call(clone, env, "make", "deploy", "bench", f"ENV={ENV}")


def parts(lines: list[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each part, from what the commands print."""
    found: dict[str, float] = {}
    begun = next((at for at, line in lines if re.search(r"\] image$", line)), 0.0)
    found["set-up: OS packages, uv, Python packages"] = begun
    for _, line in lines:
        if match := re.search(r"\] +(.+?)(?:: done)? in ([0-9.]+) s(?: \(.*\))?$", line):
            found[match[1]] = float(match[2])
        if match := re.search(r"^time: (.+?)\. Results", line):
            found |= {f"sweep: {name}": float(s) for name, s in re.findall(r"(\S+) ([0-9]+) s", match[1])}
    return found


def table(title: str, lines: list[tuple[float, str]], goal: float) -> bool:
    total = lines[-1][0]
    print(f"\n| {title} | seconds |\n|---|---|")
    for name, seconds in parts(lines).items():
        print(f"| {name} | {seconds:.0f} |")
    print(f"| all, until the report | {total:.0f} |\n")
    print(f"{title}: {total / 60:.1f} minutes, goal {goal / 60:.0f}: {'met' if total <= goal else 'MISSED'}")
    return total <= goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--busy", "--again", "--terminal", "--keep"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if os.geteuid():
        print("perf-first: needs root, to give podman an empty storage", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="perf-first-", dir="/var/tmp"))
    env = empty_caches(folder)
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(args.busy * (os.cpu_count() or 1))]
    clones = [folder / "one", folder / "two"]
    met = []
    try:
        title, goal = ("first run, busy machine", "busy") if args.busy else ("first run", "first")
        lines = first_report(clones[0], env, record if args.terminal else run)
        met += [table(title, lines, GOALS[goal]), heard(title, lines, args.terminal)]
        if args.again:
            run(clones[0], env, "make", "destroy", f"ENV={ENV}")
            met.append(table("second clone", first_report(clones[1], env), GOALS["again"]))
    finally:
        for loop in loops:
            loop.kill()
        if args.keep:
            print(f"kept in {folder}")
        else:
            remove(folder, clones, env)
    return 0 if all(met) else 1


def remove(folder: Path, clones: list[Path], env: dict[str, str]) -> None:
    for clone in clones:
        if (clone / ".state" / ENV).exists():
            subprocess.run(["make", "destroy", f"ENV={ENV}"], cwd=clone, env=env, check=False)
    # Not `podman system reset`, which would also remove the networks of other clusters.
    subprocess.run(["umount", folder / "storage/overlay"], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
