"""Run the project's tests in stages, each with its time, and end with one line that counts them.

tests/run.py check       lint, types, generated documents, unit tests, commands without a cluster
tests/run.py terraform   terraform validate and terraform test in every root
tests/run.py all         check, terraform, checkov, aws, end to end, testbeds, molecule, browser
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv/bin"
sys.path.insert(0, str(ROOT))

from cluster.core.state import terraform_binary, write_terraform_cli_config  # noqa: E402

SHELL_FILES = [".ci/run", "bin/lock", "bin/terraform"]
LINT = {
    "ansible-lint": [BIN / "ansible-lint", "--offline", "-q"],
    "ruff check": [BIN / "ruff", "check", "."],
    "ruff format": [BIN / "ruff", "format", "--check", "."],
    "mypy": [BIN / "mypy"],
    "import layers": [BIN / "lint-imports", "--no-cache"],
    "yamllint": [BIN / "yamllint", "--strict", "."],
    "shellcheck": ["shellcheck", *SHELL_FILES],
    "terraform fmt": [terraform_binary(), "fmt", "-check", "-recursive", "terraform"],
    "generated documents": [BIN / "python", "tests/docs.py", "--check"],
}


def environment(tmp: str) -> dict[str, str]:
    config = Path(tmp) / "terraform.rc"
    write_terraform_cli_config(config)
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TF_CLI_CONFIG_FILE": str(config),
        "TF_DATA_DIR": str(Path(tmp) / "terraform"),
        # ansible-lint does not read ansible/ansible.cfg.
        "ANSIBLE_ACTION_PLUGINS": str(ROOT / "ansible/plugins/action"),
    }


class Tally:
    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0

    def stage(self, name: str, argv: list[str | Path], env: dict[str, str], quiet: bool = False) -> None:
        """Run one stage; count what its last summary line counts, or the stage itself."""
        begin = time.monotonic()
        done = subprocess.run(
            [str(word) for word in argv], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        ok = done.returncode == 0
        counts = {
            word: int(found[-1])
            for word in ("passed", "failed", "skipped")
            if (found := re.findall(rf"(\d+) {word}", done.stdout))
        }
        if not counts.get("passed") and not counts.get("failed"):
            counts = {"passed": int(ok), "failed": int(not ok)}
        if not ok and not counts.get("failed"):
            counts["failed"] = 1
        self.passed += counts.get("passed", 0)
        self.failed += counts.get("failed", 0)
        self.skipped += counts.get("skipped", 0)
        if not ok or not quiet:
            print(done.stdout.rstrip(), flush=True)
        print(f"{'ok  ' if ok else 'FAIL'} {name} ({time.monotonic() - begin:.0f} s)", flush=True)


def check(tally: Tally, env: dict[str, str]) -> None:
    # Two at a time, the longest first.
    slow = [f"tests/unit/test_{name}*.py" for name in ("report", "jupyter")]
    tests = {
        "command line": [BIN / "pytest", "-q", "tests/cli"],
        "unit tests of reports": [
            BIN / "pytest",
            "-q",
            *sorted(p for pattern in slow for p in ROOT.glob(pattern)),
        ],
        "other unit tests": [BIN / "pytest", "-q", "tests/unit", *(f"--ignore-glob={pattern}" for pattern in slow)],
    }
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda item: tally.stage(item[0], list(item[1]), env, quiet=True), (tests | LINT).items()))


def terraform(tally: Tally, env: dict[str, str]) -> None:
    for root in sorted(path.parent for path in (ROOT / "terraform").glob("*/tests")):
        data = env | {"TF_DATA_DIR": f"{env['TF_DATA_DIR']}-{root.name}"}
        binary = terraform_binary()
        subprocess.run(
            [binary, "init", "-backend=false", "-input=false"], cwd=root, env=data, check=True, capture_output=True
        )
        tally.stage(
            f"terraform validate {root.name}", [binary, f"-chdir={root}", "validate", "-no-color"], data, quiet=True
        )
        tally.stage(f"terraform test {root.name}", [binary, f"-chdir={root}", "test", "-no-color"], data)


def everything(tally: Tally, env: dict[str, str]) -> None:
    check(tally, env)
    terraform(tally, env)
    tally.stage("checkov", [BIN / "pytest", "-q", "tests/checkov"], env)
    tally.stage("aws", [BIN / "pytest", "-q", "tests/aws"], env)
    tally.stage("end to end", [BIN / "pytest", "-v", "--durations=0", "tests/e2e"], env)
    tally.stage("testbeds", [BIN / "pytest", "-q", "tests/testbeds"], env)
    tally.stage("molecule", [BIN / "python", "tests/molecule/run.py"], env)
    tally.stage("browser", [BIN / "pytest", "-q", "tests/browser"], env)


def main() -> int:
    stages = {"check": check, "terraform": terraform, "all": everything}
    tally = Tally()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as tmp:
        stages[sys.argv[1]](tally, environment(tmp))
    print(f"{time.monotonic() - begin:.0f} s in all")
    print(f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
