"""tests/run.py: which stages run beside each other, what is printed and counted, and what an interrupt ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from schedule import History, Stage, seconds_until, startable, time_left  # noqa: E402

DRIVER = """
import json, os, sys
from pathlib import Path
root, folder = map(Path, sys.argv[1:3])
sys.path[:0] = [str(root), str(root / "tests")]
import stages
stages.SILENCE, stages.GRACE = 1, 20
from schedule import History, Stage
found = [Stage(**one | {"argv": tuple(one["argv"])}) for one in json.loads(sys.argv[3])]
history = History(folder / "history.json")
sys.exit(stages.Run(found, history, folder / "logs", dict(os.environ), 2, folder).run())
"""
LAST = re.compile(r"\d+ passed, \d+ failed, \d+ skipped")


def command(folder: Path, *stages: dict[str, Any]) -> list[str | Path]:
    return [sys.executable, "-c", DRIVER, ROOT, folder, json.dumps(stages)]


def run(folder: Path, *stages: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *stages), capture_output=True, text=True, timeout=120)


def script(text: str, name: str = "one", **fields: Any) -> dict[str, Any]:
    return {"name": name, "argv": [sys.executable, "-u", "-c", text], **fields}


def suite(folder: Path, name: str, text: str) -> dict[str, Any]:
    (folder / f"test_{name}.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"test_{name}.py"]
    return {"name": name, "argv": argv}


def stage(name: str, slots: float = 1, **fields: Any) -> Stage:
    return Stage(name, (), slots=slots, **fields)


def start(
    waiting: list[Stage], running: dict[Stage, float] | None = None, ended: list[str] | None = None, budget: float = 2
) -> list[Stage]:
    return startable(waiting, running or {}, ended or [], budget, lambda one: one.seconds)


def test_stages_run_side_by_side_within_the_budget() -> None:
    first, second, third = stage("a"), stage("b", 0.5), stage("c", 0.5)
    assert start([first, second, third]) == [first, second, third]
    assert start([first, stage("d", 1.5)]) == [first]


def test_stage_waits_for_the_one_it_needs() -> None:
    images, nodes, lint = stage("images"), stage("nodes", after="images"), stage("lint")
    assert start([images, nodes, lint]) == [images, lint]
    assert start([nodes], {lint: 9.0}, ended=["images"]) == [nodes]


def test_stages_that_measure_never_run_at_once() -> None:
    first, second, other = stage("a", 0.5, measures=True), stage("b", 0.5, measures=True), stage("c", 0.5)
    assert start([first, second, other], budget=8) == [first, other]


def test_small_stages_do_not_delay_a_wide_one_for_ever() -> None:
    wide, short, long = stage("wide", 2), stage("short", 0.5, seconds=20), stage("long", 0.5, seconds=40)
    assert start([wide, long, short], {stage("running", 0.5): 30.0}) == [short]
    running = {stage("soon", 0.5): 5.0, stage("later", 1): 30.0, stage("last", 0.5): 60.0}
    assert seconds_until(running, 1, 2) == 30


def test_stage_wider_than_the_machine_runs_alone() -> None:
    assert [one.name for one in start([stage("wide", 4), stage("small", 0.5)])] == ["wide"]


def test_time_left_plays_the_schedule() -> None:
    waiting = [stage("b", seconds=20), stage("c", seconds=30), stage("d", seconds=5, after="b")]
    # a until 10, beside b until 20; c from 10 to 40; d from 20 to 25.
    assert time_left(waiting, {stage("a"): 10.0}, [], 2, lambda one: one.seconds) == 40
    assert time_left([stage("x", after="failed")], {}, [], 2, lambda one: one.seconds) == 0


def test_damaged_history_is_ignored(tmp_path: Path) -> None:
    for text in ("", "[]", '{"a": 1}', '{"a": {"seconds": 3}}'):
        (tmp_path / "history.json").write_text(text)
        assert History(tmp_path / "history.json").seconds(stage("a", seconds=7)) == 7


def test_each_test_is_printed_with_its_stage_and_all_are_counted(tmp_path: Path) -> None:
    text = "import pytest\ndef test_good(): pass\ndef test_bad(): assert 'why' == 'it failed'\n"
    text += "@pytest.mark.skip(reason='later')\ndef test_skipped(): pass\n"
    text += "@pytest.mark.parametrize('log', ['UCX  ERROR no device'])\ndef test_log(log): pass\n"
    terraform = script('print(\'  run "ports"... pass\\n  run "names"... fail\'); raise SystemExit(1)', "terraform")
    done = run(tmp_path, suite(tmp_path, "unit", text), terraform, script("pass", "lint"))
    lines = done.stdout.splitlines()
    for kind, name, test in (
        ("passed", "unit", "test_unit.py::test_good"),
        ("failed", "unit", "test_unit.py::test_bad"),
        ("skipped", "unit", "test_unit.py::test_skipped"),
        ("passed", "unit", "test_unit.py::test_log[UCX  ERROR no device]"),
        ("passed", "terraform", "ports"),
    ):
        pattern = rf"{kind} +{name} +{re.escape(test)}  \[\d+ left, about \d+:\d\d\]"
        assert [line for line in lines if re.fullmatch(pattern, line)], (test, done.stdout)
    assert "AssertionError: assert 'why' == 'it failed'" in done.stdout
    assert lines[-1] == "4 passed, 2 failed, 1 skipped"
    assert done.returncode == 1


def test_passed_stages_end_with_zero_and_leave_their_time_for_the_next_run(tmp_path: Path) -> None:
    done = run(tmp_path, suite(tmp_path, "unit", "def test_a(): pass\ndef test_b(): pass\n"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    known = History(tmp_path / "history.json")
    assert known.tests(stage("unit")) == 2
    assert 0 < known.seconds(stage("unit", seconds=1000)) < 1000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\ndef test_good(): pass\ndef test_crash(): os._exit(0)\ndef test_later(): pass\n", "did not run"),
        ("import os, signal\ndef test_good(): pass\ndef test_killed(): os.kill(os.getpid(), 9)\n", "SIGKILL"),
        ("def test_good(): pass\nimport no_such_module\n", "exit code 2"),
    ],
    ids=["exit", "signal", "import"],
)
def test_crashed_stage_is_counted_as_failed(tmp_path: Path, text: str, why: str) -> None:
    done = run(tmp_path, suite(tmp_path, "crash", text), script("pass", "lint"))
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch("[12] passed, 1 failed, 0 skipped", last), done.stdout
    assert re.search(rf"^FAIL crash .*{why}", done.stdout, re.MULTILINE)
    assert done.returncode == 1


def test_stage_is_not_run_when_the_one_it_needs_failed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    second = script(f"open({str(made)!r}, 'w')", "nodes", after="images")
    done = run(tmp_path, script("raise SystemExit('no disk')", "images"), second)
    assert "no disk" in done.stdout
    assert re.search("^FAIL nodes +not run: images failed", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "0 passed, 2 failed, 0 skipped"
    assert not made.exists()


def test_quoted_output_of_another_run_is_not_counted(tmp_path: Path) -> None:
    text = "def test_bad():\n    print('tests/x.py::test_y PASSED')\n    assert False\n"
    assert run(tmp_path, suite(tmp_path, "quote", text)).stdout.endswith("\n0 passed, 1 failed, 0 skipped\n")


def test_long_test_is_named_while_it_runs(tmp_path: Path) -> None:
    done = run(tmp_path, suite(tmp_path, "slow", "import time\ndef test_that_waits(): time.sleep(4)\n"))
    assert re.search(r"^running slow: test_slow.py::test_that_waits \(\d+ s\)", done.stdout, re.MULTILINE)


def test_process_left_running_by_a_stage_does_not_hold_up_the_run(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    text = f"""
import subprocess, sys
code = "import time; time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=own) for own in (False, True)]
open({str(left)!r}, "w").write(" ".join(str(child.pid) for child in children))
"""
    begin = time.monotonic()
    done = run(tmp_path, script(text))
    inside, outside = map(int, left.read_text().split())
    os.kill(outside, signal.SIGKILL)
    assert done.returncode == 0
    assert time.monotonic() - begin < 60
    wait_for_end(inside)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        # A zombie whose parent has not looked yet has ended too.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} still runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_lets_fixtures_clean_up_and_ends_the_group(tmp_path: Path, number: signal.Signals) -> None:
    text = f"""
import pytest, subprocess, time
from pathlib import Path
folder = Path({str(tmp_path)!r})
@pytest.fixture
def node():
    child = subprocess.Popen(["sleep", "600"])
    (folder / "part").write_text(str(child.pid))
    (folder / "part").rename(folder / "pid")
    yield
    (folder / "cleaned").touch()
def test_node(node): time.sleep(600)
"""
    stages = [suite(tmp_path, "nodes", text), script("pass", "later", after="nodes")]
    process = subprocess.Popen(command(tmp_path, *stages), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "0 passed, 2 failed, 0 skipped"
    assert (tmp_path / "cleaned").exists()
    wait_for_end(int((tmp_path / "pid").read_text()))


def test_wrong_word_prints_the_kinds(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "tests/run.py", "alll"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "tests/run.py fast" in done.stderr


def test_every_test_file_belongs_to_a_stage_of_a_full_run() -> None:
    program = """
import sys
sys.path.insert(0, "tests")
import run
words = [word for stage in run.everything() for word in stage.argv]
for kind in (run.everything, run.fast, run.check, run.terraform):
    names = [stage.name for stage in kind()]
    assert len(names) == len(set(names)), names
    assert all(not stage.after or stage.after in names for stage in kind())
given = [word for word in words if word.startswith("tests/") and not word.endswith("run.py")]
missing = []
for path in sorted(run.ROOT.glob("tests/*/test_*.py")):
    name = str(path.relative_to(run.ROOT))
    # make test-long runs these.
    if name.startswith("tests/long/"):
        continue
    if not any(name == word or name.startswith(f"{word}/") for word in given):
        missing.append(name)
ignored = [word.partition("=")[2] for word in words if word.startswith("--ignore=")]
missing += [name for name in ignored if name not in given]
assert not missing, missing
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_stage_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, ROOT / "tests/run.py", "terraform", "terraform aws", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no stage nothing; choose from terraform aws" in done.stderr


def test_expected_times_fit_into_45_minutes_and_into_7_for_a_fast_run() -> None:
    program = """
import sys
sys.path.insert(0, "tests")
import run, schedule
for stages, minutes in ((run.everything(), 45), (run.fast(), 7)):
    kept = [stage for stage in stages if minutes == 45 or stage.name != "images"]
    ended = {"images"} - {stage.name for stage in kept}
    seconds = schedule.time_left(kept, {}, ended, 2, lambda stage: stage.seconds)
    assert 60 < seconds < 60 * minutes, seconds
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
