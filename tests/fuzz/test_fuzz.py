"""Every subcommand with generated arguments and files: a known exit code, a short message, no stray file.

FUZZ_EXAMPLES=10000 runs more cases, FUZZ_SEED=2 runs others, FUZZ_CASE='bench sweep/12/1' repeats one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import case, subcommands
from sandbox import Case, Sandbox

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "1000"))
SEED = os.environ.get("FUZZ_SEED", "1")
REPEATED = os.environ.get("FUZZ_CASE", "")
SUBCOMMANDS = {
    name: options for name, options in subcommands().items() if REPEATED.startswith(f"{name}/") or not REPEATED
}
# A report takes a hundred times as long as another command, and reads the same files as four of them.
SLOW = {"bench report": 5}


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    made = Sandbox(Path(os.path.realpath(tmp_path_factory.mktemp("fuzz"))))
    made.add_data()
    yield made
    made.close()


def cases_of(subcommand: str, sandbox: Sandbox) -> Iterator[Case]:
    if REPEATED:
        _, number, seed = REPEATED.rsplit("/", 2)
        yield case(subcommand, SUBCOMMANDS[subcommand], int(number), seed, sandbox)
        return
    for number in range(max(1, EXAMPLES // len(SUBCOMMANDS) // SLOW.get(subcommand, 1))):
        yield case(subcommand, SUBCOMMANDS[subcommand], number, SEED, sandbox)


# As long as FUZZ_EXAMPLES wants; the sandbox ends a case that hangs.
@pytest.mark.timeout(0)
@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_no_input_ends_in_a_traceback_a_hang_or_a_stray_file(subcommand: str, sandbox: Sandbox) -> None:
    failures = []
    for made in cases_of(subcommand, sandbox):
        outcome = sandbox.run(made)
        if problems := outcome.problems():
            failures.append(f"{made}\n  {'; '.join(problems)}\n{outcome.stderr[-3000:]}")
    strays = sandbox.listing() - sandbox.before
    # Reported once, not by every later subcommand too.
    sandbox.before |= strays
    failures += [f"stray: {path}" for path in sorted(strays)]
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures)


def test_the_sandbox_finds_what_it_is_for(sandbox: Sandbox) -> None:
    """A case that writes elsewhere, one that hangs and one that starts a real program are all found."""
    for code, found in {
        "open('/tmp/fuzz-stray', 'a').close(); import os; os.remove('/tmp/fuzz-stray')": "stray: writes",
        "import subprocess; subprocess.run(['/bin/true'])": "stray: starts /bin/true",
        "1 / 0": "traceback",
        "print(chr(27) + '[2J')": "escape sequence",
        "import sys; sys.exit(7)": "exit 7",
        "import sys; sys.exit(2)": "exit 2 without a message",
        "import time; time.sleep(1000)": "hang",
    }.items():
        problems = sandbox.run(Case("python", [code]), seconds=1).problems()
        assert any(problem.startswith(found) for problem in problems), (code, problems)
