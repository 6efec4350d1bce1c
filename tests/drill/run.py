"""Break a local cluster again and again while it measures, and check that nothing is lost (`make drill`).

    run.py [--minutes N] [--seed N] [--env NAME]

Nodes are stopped, killed, removed, paused and made mute; the controller is killed; the disk runs full: in random order,
at random moments of sweeps. After each fault:

- no trial that was recorded before has changed,
- no process is left on this machine or on a node,
- `cluster status` says what is true,
- the repair that `cluster doctor` proposes works, and the same sweep then completes.

The drill makes its own environment and removes it. The last line counts the faults: N passed, N failed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults import BIN, FAULTS, ROOT, SUDO, Fault, Scene, call, podman

from cluster.core import files, lock, process

NODES = 2
PLAN = {"nodes": [1, 2], "batches": [32, 64], "fabrics": ["1g"], "engines": ["horovod"], "seconds": 4}
DISK_MB = 32
# Longest wait for a command or for ranks to end. A machine may be busy; a hang is longer than any of this.
COMMAND_SECONDS, RANKS_SECONDS = 900, 90


class Broken(Exception):
    """A promise that did not hold."""


def cluster(scene: Scene, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [str(BIN / "cluster"), "--env", scene.env, *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_SECONDS)


def start_sweep(scene: Scene, run: str) -> subprocess.Popen[str]:
    plan = scene.state.dir / "drill.yml"
    plan.write_text(json.dumps(PLAN))
    argv = [str(BIN / "bench"), "sweep", "--env", scene.env, "--plan", str(plan), "--run", run, "--no-check"]
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Background jobs of a shell ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def recorded(scene: Scene) -> dict[Path, bytes]:
    """Complete lines of every run: an interrupted append may leave half a line."""
    found = {path: path.read_bytes() for path in scene.results.glob("*/trials.jsonl")}
    return {path: content[: content.rfind(b"\n") + 1] for path, content in found.items()}


def check_trials(scene: Scene, before: dict[Path, bytes]) -> None:
    for path, content in before.items():
        if not path.exists() or not path.read_bytes().startswith(content):
            raise Broken(f"recorded trials of {path.parent.name} changed")


def ranks(scene: Scene) -> list[str]:
    """Nodes on which a worker runs. A stopped or paused node runs nothing."""
    running = podman("ps", "--format={{.Names}}", "--filter=status=running").split()
    alive = [node for node in scene.nodes if scene.container(node) in running]
    return [
        node
        for node in alive
        if podman("exec", scene.container(node), "pgrep", "-f", "bench-worker/.* trials", check=False)
    ]


def check_processes(scene: Scene) -> None:
    deadline = time.monotonic() + RANKS_SECONDS
    while left := [*ranks(scene), *map(str, process.leftovers(scene.state.dir))]:
        if time.monotonic() > deadline:
            raise Broken(f"still running: {', '.join(left)}")
        time.sleep(1)
    if holder := lock.holder(scene.state.lock):
        raise Broken(f"the lock is still held by {holder}")


def truth(scene: Scene) -> dict[str, str]:
    states = {row["Names"][0]: row["State"] for row in json.loads(podman("ps", "-a", "--format=json") or "[]")}
    return {node: states.get(scene.container(node), "missing") for node in scene.nodes}


def check_status(scene: Scene, fault: Fault | None) -> bool:
    """Whether status finds everything well, after it was compared with podman."""
    done = cluster(scene, "status", "--json")
    try:
        rows: list[dict[str, Any]] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise Broken(f"status: {done.stderr.strip() or done.stdout.strip()}") from None
    shown, real = {row["node"]: row["state"] for row in rows}, truth(scene)
    if shown != real:
        raise Broken(f"status shows {shown}, podman {real}")
    healthy = done.returncode == 0
    if healthy != all(row["state"] == "running" and not row["problem"] for row in rows):
        raise Broken(f"status ends with {done.returncode}, but shows {rows}")
    if fault and fault.state != "running" and healthy:
        raise Broken(f"status is content after: {fault.name}")
    if fault and fault.healthy and not healthy:
        raise Broken(f"status finds a problem: {[row['problem'] for row in rows]}")
    return healthy


def repair(scene: Scene) -> None:
    """Do what doctor proposes, once. Doctor must then be content."""
    found = json.loads(cluster(scene, "doctor", "--json").stdout)
    fixes = {failure["fix"] for failure in found["failures"]}
    if fixes != {f"make deploy ENV={scene.env}"}:
        raise Broken(f"doctor proposes {sorted(fixes)} for {[failure['detail'] for failure in found['failures']]}")
    done = cluster(scene, "deploy")
    if done.returncode:
        raise Broken(f"the proposed repair failed: {done.stderr.strip()}")
    again = json.loads(cluster(scene, "doctor", "--json").stdout)
    if not again["ok"]:
        raise Broken(f"doctor after its own repair: {[failure['detail'] for failure in again['failures']]}")


def drill(scene: Scene, fault: Fault, number: int, choose: random.Random) -> str:
    """One fault during a sweep; returns what happened."""
    scene.victim = choose.choice(scene.nodes)
    run = f"run-{number}"
    command = scene.command = start_sweep(scene, run)
    try:
        log = scene.results / run / "logs"
        while command.poll() is None and not any(log.glob("*.log")):
            time.sleep(0.2)
        delay = choose.uniform(0, 25)
        deadline = time.monotonic() + delay
        while command.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        finished = command.poll() is not None
        before = recorded(scene)
        if not finished or "controller" not in fault.name:
            fault.inject(scene)
        output, _ = command.communicate(timeout=COMMAND_SECONDS)
    finally:
        scene.filler.unlink(missing_ok=True)
        if command.poll() is None:
            command.kill()
            command.wait()
    if "Traceback" in output or "this is a bug" in output:
        raise Broken(f"the sweep ended with a bug: {output.strip().splitlines()[-1]}")
    check_trials(scene, before)
    check_processes(scene)
    healthy = check_status(scene, fault)
    if not healthy:
        repair(scene)
    check_trials(scene, before)
    again = start_sweep(scene, run)
    output, _ = again.communicate(timeout=COMMAND_SECONDS)
    if again.returncode:
        raise Broken(f"the sweep does not complete afterwards: {output.strip().splitlines()[-1]}")
    check_trials(scene, before)
    latest = {trial["id"]: trial for trial in map(json.loads, (scene.results / run / "trials.jsonl").open())}
    if len(latest) != 4 or any(trial["status"] != "ok" for trial in latest.values()):
        raise Broken(f"{len(latest)} trials of 4, not all ok")
    kept = sum(content.count(b"\n") for content in before.values())
    done = "repaired" if not healthy else "nothing to repair"
    return f"{delay:.0f} s into the sweep, {kept} recorded trials unchanged, {done}"


@contextmanager
def environment(name: str) -> Iterator[Scene]:
    """A small environment with its results on a disk of a few MB."""
    scene = Scene(name, ["head", *(f"w{number}" for number in range(1, NODES))])
    folder, made = ROOT / "inventories" / name, False
    try:
        if not folder.exists():
            call(BIN / "cluster", "env", name)
            made = True
        path = folder / "group_vars/all/cluster.yml"
        content = files.mapping(path)
        # With the features of inventories/local: its image need not be built again.
        content["cluster"] |= {"nodes": NODES}
        path.write_text(json.dumps(content))
        scene.results.mkdir(parents=True, exist_ok=True)
        call(*SUDO, "mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=1777", "drill", scene.results)
        done = cluster(scene, "deploy")
        if done.returncode:
            raise Broken(f"deploy: {done.stderr.strip()}")
        yield scene
    finally:
        done = cluster(scene, "destroy", "--yes")
        call(*SUDO, "umount", scene.results, check=False)
        shutil.rmtree(scene.results, ignore_errors=True)
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if done.returncode:
            print(f"destroy: {done.stderr.strip()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="no new fault after this time (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="order, victims and moments of the faults (default 1)")
    text = "name of the environment (default drill); a folder of this name in inventories/ is used and kept"
    parser.add_argument("--env", default="drill", help=text)
    args = parser.parse_args()
    if not 0 < args.minutes < 1e6:
        parser.error(f"--minutes {args.minutes:g}: must be greater than 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    choose = random.Random(args.seed)
    end = time.monotonic() + 60 * args.minutes
    passed = failed = 0
    try:
        with environment(args.env) as scene:
            while time.monotonic() < end:
                for fault in choose.sample(FAULTS, len(FAULTS)):
                    if time.monotonic() > end:
                        break
                    try:
                        text = drill(scene, fault, passed + failed, choose)
                        passed += 1
                        print(f"ok   {fault.name} ({scene.victim}): {text}", flush=True)
                    except (Broken, RuntimeError, subprocess.TimeoutExpired) as error:
                        failed += 1
                        print(f"FAIL {fault.name} ({scene.victim}): {error}", flush=True)
                        # The next fault needs a cluster that works.
                        cluster(scene, "deploy")
    except (Broken, RuntimeError) as error:
        failed += 1
        print(f"FAIL {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
