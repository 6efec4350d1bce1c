from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path

import pytest
from report_cases import RUNS, copy

from bench.cli import main
from bench.results import runs
from bench.results.trial import Trial


def out(capsys, *args: str) -> str:
    assert main(["export", *args]) == 0
    text: str = capsys.readouterr().out
    return text


def test_csv_has_every_trial_and_value(capsys) -> None:
    rows = list(csv.DictReader(io.StringIO(out(capsys, str(RUNS / "network-1g")))))
    trials = runs.load(RUNS / "network-1g").trials
    assert len(rows) == 90
    for row, trial in zip(rows, trials, strict=True):
        assert trial.images_per_second is not None and trial.emulation is not None
        assert float(row["images_per_second.median"]) == trial.images_per_second.median
        assert float(row["emulation.scale"]) == trial.emulation.scale
        assert row["id"] == trial.id
    assert float(rows[9]["efficiency"]) < 0.12


def test_csv_columns_do_not_depend_on_what_was_measured(capsys) -> None:
    first = out(capsys, str(RUNS / "wrong-nic")).splitlines()[0]
    assert first == out(capsys, str(RUNS / "compute-ib")).splitlines()[0]


def test_csv_cells_cannot_be_formulas(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path, lambda t: t.update(status="failed", error="=cmd()|x", error_node="@w1"))
    row = next(csv.DictReader(io.StringIO(out(capsys, str(folder)))))
    assert row["error"] == "'=cmd()|x" and row["error_node"] == "'@w1"


def test_json_round_trips_the_trials(capsys) -> None:
    document = json.loads(out(capsys, str(RUNS / "straggler"), "--json"))
    for record, trial in zip(document["trials"], runs.load(RUNS / "straggler").trials, strict=True):
        record.pop("efficiency")
        assert Trial.model_validate(record) == trial
    assert document["provenance"]["constructed"]


def test_mlperf_lines_follow_the_mlcommons_format(capsys) -> None:
    lines = out(capsys, str(RUNS / "wrong-nic"), "--format", "mlperf").splitlines()
    events = []
    for line in lines:
        assert line.startswith(":::MLLOG ")
        event = json.loads(line.removeprefix(":::MLLOG "))
        assert set(event) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
        assert event["event_type"] in ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")
        assert {"file", "lineno"} <= set(event["metadata"])
        events.append(event)
    starts = [event for event in events if event["key"] == "run_start"]
    stops = [event for event in events if event["key"] == "run_stop"]
    assert len(starts) == len(stops) == 3
    assert [stop["metadata"]["status"] for stop in stops] == ["success", "aborted", "aborted"]
    batches = [event["value"] for event in events if event["key"] == "global_batch_size"]
    assert batches == [64, 128, 256]


def crc32c(data: bytes) -> int:
    """Castagnoli's polynomial, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(value: int) -> int:
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_crc32c_matches_its_published_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def read_events(path: Path) -> list[tuple[int, str, float]]:
    """An independent reading of the format, written from its description: frames, then fields."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(crc32c(data[:8]))
        event, crc = data[12 : 12 + length], data[12 + length : 16 + length]
        assert struct.unpack("<I", crc)[0] == masked(crc32c(event))
        data = data[16 + length :]
        fields = dict(read_fields(event))
        if 5 in fields:
            value = dict(read_fields(dict(read_fields(fields[5]))[1]))
            found.append((fields[2], value[1].decode(), struct.unpack("<f", value[2])[0]))
        else:
            assert fields[3] == b"brain.Event:2"
    return found


def read_fields(data: bytes):
    while data:
        key, data = read_varint(data)
        if key & 7 == 0:
            value, data = read_varint(data)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, data = read_varint(data)
            value, data = data[:size], data[size:]
        yield key >> 3, value


def read_varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for position, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[position + 1 :]
    raise AssertionError("unfinished number")


def test_tensorboard_scalars_hold_the_curve(tmp_path: Path) -> None:
    assert main(["export", str(RUNS / "engines"), "--format", "tensorboard", "--out", str(tmp_path)]) == 0
    files = sorted(tmp_path.glob("*/events.out.tfevents.*"))
    assert len(files) == 4
    events = read_events(next(path for path in files if "ps_none_1g" in str(path)))
    curve = {step: value for step, tag, value in events if tag == "images_per_second"}
    trials = [t for t in runs.load(RUNS / "engines").trials if t.point.engine == "ps" and t.point.fabric == "1g"]
    for trial in trials:
        assert trial.images_per_second is not None
        assert curve[trial.point.nodes] == pytest.approx(trial.images_per_second.median, rel=1e-6)


def test_tensorboard_curves_of_hostile_names_stay_in_their_folder(tmp_path: Path) -> None:
    folder = copy("straggler", tmp_path, lambda t: t["point"].update(fabric="../../../x", engine="a/b"))
    target = tmp_path / "tb"
    assert main(["export", str(folder), "--format", "tensorboard", "--out", str(target)]) == 0
    assert all(path.parent.parent == target for path in tmp_path.rglob("events.out*"))


def test_tensorboard_needs_a_folder(capsys) -> None:
    assert main(["export", str(RUNS / "straggler"), "--format", "tensorboard"]) == 2
    assert "--out" in capsys.readouterr().err


def test_unwritable_target_exits_3(tmp_path: Path, capsys) -> None:
    assert main(["export", str(RUNS / "straggler"), "--out", str(tmp_path / "no" / "where.csv")]) == 3
    assert "cannot write" in capsys.readouterr().err


def test_csv_stays_clean_and_the_line_left_out_is_named(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path)
    (folder / "trials.jsonl").write_text("nonsense\n" + (folder / "trials.jsonl").read_text())
    assert main(["export", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("schema_version,") and "line 1" in err
