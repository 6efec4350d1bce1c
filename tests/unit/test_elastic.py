"""bench elastic: what a trace says about a fault, and whether every image was used once with the same weights."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_run import nodes

from bench.elastic import command, report, trace
from bench.elastic.faults import FAULTS, Fault
from bench.elastic.live import Live
from bench.elastic.report import Checked, Measured
from bench.elastic.trace import Row
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State

# Two epochs of 4 steps with 12 images each, a step per second.
STEPS, IMAGES = 4, range(12)


def step(number: int, time: float, size: int, generation: int, first: int = 0) -> list[Row]:
    """The weights after a step are seven times its number."""
    used = [image for image in IMAGES if image % STEPS == number % STEPS]
    weights = (7 * (first - 1), 7 * number)
    return [
        Row(f"n{rank}.0", time + rank / 100, number, generation, rank, size, tuple(used[rank::size]), *weights)
        for rank in range(size)
    ]


def undisturbed() -> list[Row]:
    return [row for number in range(8) for row in step(number, float(number), 3, 1)]


def disturbed() -> list[Row]:
    """A process is lost at 3.5 s, after step 3. The others go on at 9 s from step 2."""
    before = [row for number in range(4) for row in step(number, float(number), 3, 1)]
    return before + [row for number in range(2, 8) for row in step(number, 7.0 + number, 2, 2, first=2)]


def test_recovery_says_what_a_fault_cost() -> None:
    found = trace.recovery(disturbed(), at=3.5, window=3)
    assert found is not None
    assert (found.nodes_before, found.nodes_after, found.steps_lost) == (3, 2, 2)
    assert found.seconds == pytest.approx(5.5) and found.stood == pytest.approx(5.98)
    # Three steps of three images within three seconds.
    assert found.before == pytest.approx(3) and found.after == pytest.approx(3)


def test_a_step_that_ends_after_the_fault_is_not_the_recovery() -> None:
    found = trace.recovery(disturbed(), at=2.5, window=3)
    assert found is not None and found.seconds == pytest.approx(6.5)


@pytest.mark.parametrize("at", [-1.0, 20.0])
def test_without_steps_on_both_sides_there_is_no_recovery_yet(at: float) -> None:
    assert trace.recovery(disturbed(), at, window=3) is None
    assert trace.recovery(undisturbed(), 3.5, window=3) is None


def test_steps_that_were_done_again_count_once() -> None:
    assert trace.problems(undisturbed(), IMAGES, STEPS) == []
    assert trace.problems(disturbed(), IMAGES, STEPS) == []


def changed(**values: object) -> list[Row]:
    rows = disturbed()
    return [*rows[:-3], replace(rows[-3], **values), *rows[-2:]]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (changed(weights=1), "step 6: the weights differ between ranks"),
        (changed(start=1), "generation 2: it did not start from the weights after step 1"),
        (changed(images=(0,)), "epoch 1: 1 images too many, 1 missing"),
        (disturbed()[:-1], "step 7: ranks [0] of 2"),
        ([row for row in disturbed() if row.step != 1], "epoch 0: 3 of 4 steps"),
    ],
)
def test_a_wrong_trace_is_found(rows: list[Row], problem: str) -> None:
    found = trace.problems(rows, IMAGES, STEPS)
    assert problem in found


def test_a_line_that_a_stopped_node_left_half_is_skipped() -> None:
    row = {**asdict(undisturbed()[0])}
    row.pop("place")
    lines = [json.dumps(row), json.dumps(row)[:40], "null", '{"step": 1}']
    text = "".join(f"trace-w1.0.jsonl:{line}\n" for line in lines)
    (found,) = trace.parse(text)
    assert found == replace(undisturbed()[0], place="w1.0")


def test_report_has_a_row_per_fault_and_the_dip(tmp_path: Path) -> None:
    rows = disturbed()
    recovery = trace.recovery(rows, 3.5, 3)
    assert recovery
    measured = [Measured("rank killed", n, "w1", 3.5, recovery, trace.series(rows, 3.5)) for n in (1, 2)]
    report.write(tmp_path, measured, nodes(3))
    line = next(line for line in (tmp_path / "report.md").read_text().splitlines() if "rank killed" in line)
    assert line == "| rank killed | 2 | 5.5 (5.5-5.5) | 6.0 | 2 (max 2) | 3 to 2 | 3 to 3 |"
    assert "<svg" in (tmp_path / "dip.svg").read_text()


class Scripted(command.Measurement):
    """A measurement whose node is lost after so many faults."""

    def __init__(self, good: int) -> None:
        self.good, self.asked = good, list[tuple[str, int]]()
        super().__init__("x", State("x"), nodes(3), Progress("x"))

    def start(self) -> Live:
        return Live(self.contract, "r")

    def end(self, live: Live) -> None: ...

    def check(self, live: Live) -> Checked:
        return Checked("r", 8, 12, [])

    def measure(self, live: Live, fault: Fault, number: int) -> list[Measured]:
        if len(self.asked) == self.good:
            raise InfraError("node w1 is lost")
        self.asked.append((fault.name, number))
        recovery = trace.recovery(disturbed(), 3.5, 3)
        assert recovery
        return [Measured(fault.name, number, "w1", 3.5, recovery, trace.series(disturbed(), 3.5))]


class Traced(Live):
    """A run whose last step only one process had ended when it was cancelled."""

    def rows(self, lines: str = "") -> list[Row]:
        assert lines == "+1"
        return [*disturbed(), step(8, 16.0, 2, 2)[0]]


def test_report_says_whether_the_training_was_right_in_spite_of_the_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.Measurement, "batch", 1)
    monkeypatch.setattr(command.Measurement, "micro_batches", 3)
    measurement = command.Measurement("x", State("x"), nodes(3), Progress("x"))
    good = measurement.check(Traced(nodes(3), "r"))
    assert good == Checked("r", 8, 12, [])
    monkeypatch.setattr(Traced, "rows", lambda *_: [*changed(weights=1), *step(8, 16.0, 2, 2)])
    bad = measurement.check(Traced(nodes(3), "s"))
    assert bad.problems == ["step 6: the weights differ between ranks"]
    recovery = trace.recovery(disturbed(), 3.5, 3)
    assert recovery
    for one in (good, bad):
        report.append(tmp_path, report.CHECKS, one)
    report.write(tmp_path, [Measured("rank killed", 1, "w1", 3.5, recovery, [(0.0, 1.0)])], nodes(3))
    text = (tmp_path / "report.md").read_text()
    assert "Run r, 8 steps: all processes had the same weights" in text and "each of 12 images once per epoch." in text
    assert "Run s, 8 steps: step 6: the weights differ between ranks." in text


def test_interrupted_measurement_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.store, "RESULTS", tmp_path)
    faults = [FAULTS["rank killed"], FAULTS["node drained"]]
    folder = command.results("x", None)
    first, second = Scripted(good=3), Scripted(good=9)
    with pytest.raises(InfraError):
        first.run(folder, faults, 2)
    second.run(command.results("x", "latest"), faults, 2)
    assert second.asked == [("node drained", 2)]
    text = (folder / "report.md").read_text()
    assert "| rank killed | 2 |" in text and "| node drained | 2 |" in text
    second.contract = nodes(4)
    with pytest.raises(UserError, match=f"^--resume {folder.name}: measured with 3 processes, the cluster has 4"):
        second.run(folder, faults, 3)
    with pytest.raises(UserError, match=f"^--resume yesterday: .*{folder.name}"):
        command.results("x", "yesterday")


def test_faults_of_whole_nodes_need_local_ones() -> None:
    cluster = nodes(4)
    assert len(command.chosen(None, cluster)) == len(FAULTS)
    elsewhere = cluster.model_copy(update={"provider": "aws"})
    assert [fault.name for fault in command.chosen(None, elsewhere)] == ["rank killed", "node drained"]
    with pytest.raises(UserError, match="--fault 'node paused'"):
        command.chosen(["node paused"], elsewhere)
    with pytest.raises(UserError, match="at least 3 nodes"):
        command.chosen(None, nodes(2))
