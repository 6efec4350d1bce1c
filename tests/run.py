"""Run the project's tests in stages and end with one line that counts them.

    tests/run.py check          lint, types, generated documents, unit tests, commands without a cluster
    tests/run.py terraform      terraform validate and terraform test in every root
    tests/run.py fast           check, terraform, one deploy and sweep, three roles
    tests/run.py all            check, terraform, checkov, aws, end to end, testbeds, molecule, browser
    tests/run.py all STAGE...   these stages and what they wait for, such as: tests/run.py all sweep "molecule ssh"

Stages run beside each other as far as the cores allow. Each test is printed as it ends, and the whole output of a stage
is in .state/test-logs. A stage that passes leaves its time in the cache folder: the next run estimates with it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv/bin"
sys.path[:0] = [str(ROOT), str(ROOT / "tests/molecule")]

from nodes import ON_REQUEST, scenarios  # noqa: E402
from schedule import History, Stage  # noqa: E402
from stages import Run  # noqa: E402

from cluster.core.state import CACHE, terraform_binary, write_terraform_cli_config  # noqa: E402

SHELL_FILES = [".ci/run", "bin/env", "bin/lock", "bin/terraform"]
LINT = {
    "ruff check": [BIN / "ruff", "check", "."],
    "ruff format": [BIN / "ruff", "format", "--check", "."],
    "mypy": [BIN / "mypy"],
    "import layers": [BIN / "lint-imports", "--no-cache"],
    "yamllint": [BIN / "yamllint", "--strict", "."],
    "shellcheck": ["shellcheck", *SHELL_FILES],
    "terraform fmt": [terraform_binary(), "fmt", "-check", "-recursive", "terraform"],
    "generated documents": [BIN / "python", "tests/docs.py", "--check"],
}
MEASURING_ROLES = ("fabric", "jupyterlab", "monitoring")
FAST_ROLES = ["ssh", "mpi", "data"]
FAST_SWEEP = [
    f"tests/e2e/test_sweep.py::test_{name}"
    for name in ("measured_steps_agree_with_the_network_rate", "report_marks_results_as_emulated")
]


def environment(tmp: str) -> dict[str, str]:
    config = Path(tmp) / "terraform.rc"
    write_terraform_cli_config(config)
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "TF_CLI_CONFIG_FILE": str(config),
        "TF_DATA_DIR": str(Path(tmp) / "terraform"),
        # ansible-lint does not read ansible/ansible.cfg.
        "ANSIBLE_ACTION_PLUGINS": str(ROOT / "ansible/plugins/action"),
    }


def pytest(*words: str | Path) -> tuple[str, ...]:
    # The log ends with the slowest tests.
    return (str(BIN / "pytest"), "-v", "--color=no", "--durations=15", "--durations-min=2", *map(str, words))


def check() -> list[Stage]:
    slow = [f"tests/unit/test_{name}*.py" for name in ("report", "jupyter")]
    reports = sorted(path.relative_to(ROOT) for pattern in slow for path in ROOT.glob(pattern))
    others = pytest("tests/unit", *(f"--ignore-glob={pattern}" for pattern in slow))
    return [
        # The longest first.
        Stage("command line", pytest("tests/cli"), seconds=195),
        Stage("unit tests", others, seconds=180),
        Stage("unit tests of reports", pytest(*reports), seconds=50),
        Stage("ansible-lint", (str(BIN / "ansible-lint"), "--offline", "-q"), seconds=30),
        *(Stage(name, tuple(map(str, argv)), seconds=3) for name, argv in LINT.items()),
    ]


def terraform() -> list[Stage]:
    binary, found = str(terraform_binary()), []
    for root in sorted(path.parent for path in (ROOT / "terraform").glob("*/tests")):
        here = [binary, f"-chdir={root}"]
        steps = [["init", "-backend=false", "-input=false", "-no-color"], ["validate", "-no-color"]]
        script = " && ".join(shlex.join(here + step) for step in [*steps, ["test", "-no-color"]])
        # One data folder per root, inside that of the run.
        script = f'export TF_DATA_DIR="$TF_DATA_DIR-{root.name}"; {script}'
        found.append(Stage(f"terraform {root.name}", ("sh", "-c", script), seconds=5))
    return found


def molecule(chosen: list[str]) -> list[Stage]:
    argv = (str(BIN / "python"), "tests/molecule/run.py")
    return [
        Stage(f"molecule {key}", (*argv, key), 105, 0.5, key in MEASURING_ROLES, images_of(key), needs_root=True)
        for key in chosen
    ]


def images_of(key: str) -> str:
    return "images of trixie" if key.endswith("/trixie") else "images"


def images(chosen: list[str]) -> list[Stage]:
    """Every image that later stages boot, made once. Those of the second Debian are made meanwhile."""
    argv = (str(BIN / "python"), "tests/molecule/run.py", "--images")
    found = {name: [key for key in chosen if images_of(key) == name] for name in map(images_of, chosen)}
    seconds = {"images": 370}
    return [Stage(name, (*argv, *keys), seconds.get(name, 40), needs_root=True) for name, keys in found.items()]


def booting(name: str, *words: str, seconds: float, slots: float = 1, measures: bool = False) -> Stage:
    return Stage(name, pytest(*words), seconds, slots, measures, after="images", needs_root=True)


def everything() -> list[Stage]:
    roles = [key for key in scenarios()[::-1] if key not in ON_REQUEST]
    return [
        *images(roles),
        # They compare times, so only a stage that mostly waits runs beside them.
        booting("sweep", "tests/e2e/test_sweep.py", seconds=350, slots=1.5, measures=True),
        booting("data", "tests/e2e/test_data.py", seconds=110, slots=1.5, measures=True),
        # Their trials must work, but no test compares their times.
        booting("gpulab", "tests/testbeds/test_gpulab_jobs.py", seconds=335, measures=True),
        booting("virtual wall", "tests/testbeds/test_virtualwall.py", seconds=310, measures=True),
        booting("bare metal", "tests/e2e/test_baremetal.py", seconds=240, measures=True),
        *molecule(roles),
        booting("end to end", "tests/e2e", *ignored("e2e", "sweep", "data", "baremetal"), seconds=510),
        Stage("testbeds", pytest("tests/testbeds", *ignored("testbeds", "gpulab_jobs", "virtualwall")), 85, slots=0.5),
        Stage("fuzz", pytest("tests/fuzz"), seconds=80),
        Stage("aws", pytest("tests/aws"), seconds=400, slots=0.5),
        Stage("browser", pytest("tests/browser"), seconds=40),
        Stage("checkov", pytest("tests/checkov"), seconds=15),
        *check(),
        *terraform(),
    ]


def ignored(folder: str, *names: str) -> list[str]:
    """Files that have a stage of their own."""
    return [f"--ignore=tests/{folder}/test_{name}.py" for name in names]


def fast() -> list[Stage]:
    return [
        *images(FAST_ROLES),
        booting("deploy and sweep", *FAST_SWEEP, seconds=60, slots=1.5, measures=True),
        *molecule(FAST_ROLES),
        *check(),
        *terraform(),
    ]


def main() -> int:
    kinds = {"check": check, "terraform": terraform, "fast": fast, "all": everything}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        print(__doc__, file=sys.stderr)
        return 2
    stages, names = kinds[sys.argv[1]](), sys.argv[2:]
    if unknown := set(names) - {stage.name for stage in stages}:
        known = ", ".join(stage.name for stage in stages)
        print(
            f"tests/run.py {sys.argv[1]}: no stage {', '.join(sorted(unknown))}; choose from {known}", file=sys.stderr
        )
        return 2
    if names:
        needed = {stage.after for stage in stages if stage.name in names} | set(names)
        stages = [stage for stage in stages if stage.name in needed]
    rooted = [stage.name for stage in stages if stage.needs_root]
    if rooted and os.geteuid() != 0:
        print("make test boots nodes and needs root: run it as root; make check does not need it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as tmp:
        history = History(CACHE / "test-durations.json")
        budget = max(2, len(os.sched_getaffinity(0)))
        return Run(stages, history, ROOT / ".state/test-logs", environment(tmp), budget, ROOT).run()


if __name__ == "__main__":
    sys.exit(main())
