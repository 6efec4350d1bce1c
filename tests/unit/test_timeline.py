from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import timeline
from bench.cli import main


def trace(steps: int = 3, exposed_us: int = 400, ranks: int = 2) -> list[dict]:
    """As Horovod writes it: a process per tensor; negotiation with a tick per rank, then the collective.

    Two tensors, submitted at 0 and 1000; the first is reduced from 200 to 800, the second from 1000 until
    `exposed_us` after it was submitted, which is the end of backward.
    """
    events: list[dict] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "grad.fc"}},
        {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "grad.conv"}},
    ]
    for step in range(steps):
        at = step * 5000
        for pid, submitted, begin, end in ((1, 0, 200, 800), (2, 1000, 1000, 1000 + exposed_us)):
            events.append({"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": at + submitted, "pid": pid})
            for rank in range(ranks):
                tick = at + min(submitted + 100 * rank, begin)
                events.append({"ph": "X", "name": str(rank), "ts": tick, "pid": pid, "dur": 0})
            events.append({"ph": "E", "ts": at + begin, "pid": pid})
            events.append({"ph": "B", "name": "ALLREDUCE", "ts": at + begin, "pid": pid})
            events.append({"ph": "B", "name": "MPI_ALLREDUCE", "ts": at + begin + 10, "pid": pid})
            events.append({"ph": "E", "ts": at + end - 10, "pid": pid})
            events.append({"ph": "E", "ts": at + end, "pid": pid, "args": {"dtype": "float32"}})
        events.append({"ph": "i", "name": "CYCLE_START", "ts": at, "s": "g"})
    return events


def test_exposed_communication_is_what_follows_compute() -> None:
    steps = timeline.analyse(trace(exposed_us=400))
    assert len(steps) == 3
    for step in steps:
        assert step.exposed_ms == pytest.approx(0.4)
        assert step.hidden_ms == pytest.approx(0.6)
        assert step.comm_ms == pytest.approx(1.0)
    assert [step.period_ms for step in steps] == [None, 5.0, 5.0]


def test_known_compute_time_gives_what_the_file_cannot() -> None:
    """Step 0 ends at 1.5 ms; 4.1 ms of compute later the first all-reduce has 0.2 ms to go and the second all 0.5."""
    steps = timeline.analyse(trace(exposed_us=500), compute_ms=4.1)
    assert steps[1].exposed_ms == pytest.approx(0.7)
    steps = timeline.analyse(trace(exposed_us=500), compute_ms=4.7)
    assert steps[1].exposed_ms == pytest.approx(0.3)
    assert steps[1].hidden_ms == pytest.approx(0.8)


def test_timeline_recorded_from_horovod() -> None:
    """Two ranks of Horovod 0.28.1 over Gloo, eight steps of six linear layers, and one averaged metric in between."""
    events = timeline.read(Path(__file__).parents[1] / "fixtures" / "runs" / "horovod-timeline.json")
    steps = timeline.analyse(events)
    assert [step.number for step in steps] == list(range(8))
    assert {step.tensors for step in steps} == {12}
    for step in steps:
        assert 0 < step.exposed_ms <= step.comm_ms
        assert step.period_ms is None or step.comm_ms < step.period_ms
    assert steps[0].last_rank in ("0", "1"), "ranks are named until the response cache takes over"


def test_tensors_fused_into_one_all_reduce_are_counted_once() -> None:
    events: list[dict] = []
    for pid in (1, 2, 3):
        events += [
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": pid, "pid": pid},
            {"ph": "E", "ts": 10, "pid": pid},
            {"ph": "B", "name": "ALLREDUCE", "ts": 10, "pid": pid},
            {"ph": "E", "ts": 1010, "pid": pid},
        ]
    (step,) = timeline.analyse(events)
    assert step.comm_ms == pytest.approx(1.0)


def test_tensor_that_appears_once_does_not_end_the_count() -> None:
    events = trace(steps=5)
    events += [
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 90_000, "pid": 9},
        {"ph": "B", "name": "ALLREDUCE", "ts": 90_001, "pid": 9},
        {"ph": "E", "ts": 90_002, "pid": 9},
    ]
    assert len(timeline.analyse(events)) == 5


def test_other_collectives_and_their_ticks_do_not_disturb() -> None:
    broadcast = [{"ph": "B", "name": "NEGOTIATE_BROADCAST", "ts": -90, "pid": pid} for pid in range(20, 60)] + [
        {"ph": "X", "name": "1", "ts": -80, "pid": pid, "dur": 0} for pid in range(20, 60)
    ]
    metric = [
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 4000, "pid": 70},
        {"ph": "B", "name": "ALLREDUCE", "ts": 4001, "pid": 70},
        {"ph": "E", "ts": 4002, "pid": 70},
    ]
    steps = timeline.analyse(broadcast + trace(steps=5) + metric)
    assert [(step.tensors, round(step.exposed_ms, 3)) for step in steps] == [(2, 0.4)] * 5


def test_compute_ends_when_the_last_rank_has_the_last_gradient() -> None:
    """Rank 1 has the tensor at 0, rank 0 at 700; both reduce from 800 to 1000."""
    events = [
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 0, "pid": 1},
        {"ph": "X", "name": "1", "ts": 0, "pid": 1, "dur": 0},
        {"ph": "X", "name": "0", "ts": 700, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 700, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 800, "pid": 1},
        {"ph": "E", "ts": 1000, "pid": 1},
    ]
    (step,) = timeline.analyse(events)
    assert (step.exposed_ms, step.rank_spread_ms, step.last_rank) == (0.2, 0.7, "0")


def test_command_sums_up_and_annotates(tmp_path: Path, capsys) -> None:
    file, annotated = tmp_path / "timeline.json", tmp_path / "annotated.json"
    file.write_text(json.dumps(trace()))
    assert main(["timeline", str(file), "--json", "--out", str(annotated)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["count"] == 3 and report["exposed_total_ms"] == pytest.approx(1.2)
    events = json.loads(annotated.read_text())
    shown = [event for event in events if event.get("pid") == timeline.OUR_PID and event["ph"] == "X"]
    assert [event["dur"] for event in shown] == [400, 400, 400]
    assert len(timeline.analyse(events)) == 3, "an annotated trace can be read again"


def test_trace_of_a_killed_job_is_read_up_to_the_cut(tmp_path: Path, capsys) -> None:
    text = "[\n" + ",\n".join(json.dumps(event) for event in trace(steps=4))
    file = tmp_path / "timeline.json"
    file.write_text(text[:-300])
    assert main(["timeline", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 3


def test_command_says_when_its_figure_is_a_lower_bound(tmp_path: Path, capsys) -> None:
    file = tmp_path / "timeline.json"
    file.write_text(json.dumps(trace()))
    assert main(["timeline", str(file)]) == 0
    assert "at least 0.4 of 1.0 ms" in capsys.readouterr().out
    assert main(["timeline", str(file), "--compute-ms", "4.7"]) == 0
    assert "Typical step: 0.3 of 1.0 ms" in capsys.readouterr().out
    assert main(["timeline", str(file), "--compute-ms", "-1"]) == 2
    assert "--compute-ms" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "hello", "[]", "{}", "[1, 2]", '[{"ph": "B"}]'])
def test_what_is_no_timeline_exits_2(text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert main(["timeline", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: FILE:") and error.count("\n") == 1
