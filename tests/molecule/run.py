"""Run the roles' Molecule scenarios. Prints one line per test and per scenario, then the number of passes and failures.

    run.py [-j JOBS] [--images] [ROLE | ROLE/SCENARIO ...]

A role without a scenario means its scenario `default`. --images only makes the images that the scenarios boot. The
output is in .state/molecule-logs/<role>[-<scenario>].log; its last lines are printed on failure. Nodes, networks and
keys are removed in any case.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkouts
from nodes import ON_REQUEST, Scenario, scenarios, wheelhouses_of

from cluster import image, wheelhouse
from cluster.core import config, lock
from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent, end_leftovers
from cluster.core.progress import Progress
from cluster.core.state import State

BASE = Path(__file__).resolve().parent
LOGS = ROOT / ".state/molecule-logs"
SHOWN_LINES = 40
PHASE = re.compile(r"INFO +\[\S+ > (?P<phase>\w+)\] Executing")
# A test's line in the output of pytest -v.
TEST = re.compile(r"tests/(?P<test>\S+::.*) (?P<result>PASSED|FAILED|ERROR|SKIPPED)( +\[ *\d+%\])?")


def images(chosen: list[str]) -> dict[str, str]:
    """Environment variables that tell nodes.py which images to boot. Builds missing images."""
    # Several checks of the images may run at once, for other scenarios. The state of a failed one keeps its log.
    state = State(f"molecule-images-{chosen[0].replace('/', '-')}")
    state.prepare()

    progress = Progress("molecule")
    found: dict[str, str] = {}
    with progress.phase("images", quiet=True):
        for scenario in map(Scenario, chosen):
            for platform in scenario.platforms:
                wheelhouse.fill(
                    wheelhouses_of(platform), scenario.cluster.os_release, LOGS / "wheelhouse.log", progress
                )
                variable = scenario.image_variable(platform)
                if variable not in found:
                    found[variable] = image_of(scenario, platform, state, progress)
    state.remove()
    return found


def image_of(scenario: Scenario, platform: dict[str, Any], state: State, progress: Progress) -> str:
    if platform["image"] == "base":
        return image.ensure_base(state, scenario.cluster.os_release, progress)
    cluster = config.load("local").model_copy(update={"name": "molecule"})
    return image.ensure(state, cluster, progress)


def log_of(key: str) -> Path:
    return LOGS / f"{key.replace('/', '-')}.log"


def run(key: str) -> tuple[bool, float]:
    scenario = Scenario(key)
    state = scenario.state
    with checkouts.alone(scenario.cluster.name), lock.environment(state.lock, state.env):
        start = time.monotonic()
        end_leftovers(state.dir)
        state.prepare()
        env = state.environment() | {"SCENARIO_BASE": str(BASE), "MOLECULE_GLOB": "molecule/*/molecule.yml"}
        env |= {"PYTHONPATH": f"{BASE}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "ANSIBLE_FORCE_COLOR": "0"}
        env |= {"NO_COLOR": "1", "MOLECULE_EPHEMERAL_DIRECTORY": str(state.dir / "molecule")}
        try:
            with log_of(key).open("w") as out:
                passed = apply_and_verify(scenario, env, out)
        finally:
            end_leftovers(state.dir)
            scenario.destroy()
            state.remove()
    return passed, time.monotonic() - start


def apply_and_verify(scenario: Scenario, env: dict[str, str], log: TextIO) -> bool:
    print(f"{scenario.key}: create", flush=True)
    try:
        scenario.create()
    except InfraError as error:
        log.write(f"{error}\n")
        return False
    process = subprocess.Popen(
        ["molecule", "--base-config", BASE / "base.yml", "test", "-s", scenario.name, "--destroy=never"],
        cwd=ROOT / "roles" / scenario.role,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)
        log.flush()
        if match := PHASE.fullmatch(line.strip()):
            print(f"{scenario.key}: {match['phase']}", flush=True)
        if match := TEST.fullmatch(line.strip()):
            print(f"{scenario.key}::{match['test'].partition('::')[2]} {match['result']}", flush=True)
    return process.wait() == 0


def report(key: str, passed: bool, seconds: float) -> None:
    print(f"{key}::scenario {'PASSED' if passed else 'FAILED'} {seconds:.1f} s", flush=True)
    if not passed:
        lines = log_of(key).read_text().splitlines()[-SHOWN_LINES:]
        print("\n".join(f"    {line}" for line in lines), flush=True)


def main() -> int:
    known = scenarios()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--images", action="store_true", help="only make the images of these scenarios")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="number of scenarios at a time (default 2)")
    args = parser.parse_args()
    unknown = [key for key in args.scenarios if key not in known]
    if unknown or args.jobs < 1:
        wrong = (
            f"{unknown[0]}: no such scenario; choose from {', '.join(known)}"
            if unknown
            else "--jobs: must be at least 1"
        )
        print(f"molecule: {wrong}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    # The last roles take longest, so start them first.
    chosen = args.scenarios or [key for key in known[::-1] if key not in ON_REQUEST]
    try:
        os.environ.update(images(chosen))
        if args.images:
            return 0
        with ThreadPoolExecutor(args.jobs) as pool:
            running = {key: pool.submit(run, key) for key in chosen}
            try:
                for key, future in running.items():
                    passed, seconds = future.result()
                    report(key, passed, seconds)
                    failed += not passed
            except BaseException:
                # Do not wait for the other scenarios. Each cleans up when it is ended.
                pool.shutdown(wait=False, cancel_futures=True)
                for key in chosen:
                    end_leftovers(Scenario(key).state.dir)
                raise
    except (UserError, InfraError) as error:
        print(f"molecule: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
