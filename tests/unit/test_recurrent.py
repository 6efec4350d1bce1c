"""The roofline of recurrent layers: weights that are read in every time step, and weights that stay on chip."""

import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.explain import recurrent
from bench.explain.recurrent import Cell, Chip

# Of Diamos et al. 2016: 6.1 TFLOP/s, 336 GB/s and 24 multiprocessors with 256 KB of registers.
TITAN_X = Chip("titan-x", "fp32", 6.1, 336.0, 6.29, 4)


def test_a_titan_x_keeps_1152_units_and_reaches_the_published_rate_at_batch_4() -> None:
    assert TITAN_X.largest_hidden("rnn") >= 1152
    (row,) = recurrent.rows(Cell("rnn", 1152), TITAN_X, [4])
    assert row.kept is not None
    assert row.kept.tflops == pytest.approx(2.8, rel=0.05)
    # Their matrix products were 30 times slower; memory alone explains a part of it.
    assert row.gain is not None and row.gain > 4


def test_small_batches_read_weights_and_large_ones_compute() -> None:
    device = recurrent.chip("p100")
    small, large = recurrent.rows(Cell("lstm", 768), device, [1, 1024])
    # Each weight of 4 bytes does 2 FLOP per sequence.
    assert small.reload.flop_per_byte == pytest.approx(0.5, rel=0.01)
    assert small.reload.weight_share > 0.99 and small.reload.bound == "weights"
    assert large.reload.bound == "compute"
    assert small.kept is not None and large.kept is not None
    assert small.kept.weight_share == 0
    # What is kept helps small batches most.
    assert small.gain is not None and large.gain is not None
    assert small.gain > 3 * large.gain >= 3


@pytest.mark.parametrize("kind", list(recurrent.CELLS))
def test_the_register_file_is_the_limit(kind: str) -> None:
    device = recurrent.chip("v100")
    most = device.largest_hidden(kind)
    fits, too_large = (recurrent.explain(Cell(kind, size), device, [1]) for size in (most, most + 1))
    assert fits["fits"] and fits["devices_to_hold_it"] == 1 and fits["batches"][0]["kept"]
    assert not too_large["fits"] and too_large["devices_to_hold_it"] == 2 and too_large["batches"][0]["kept"] is None
    # A cell with four matrices holds half the units of a cell with one.
    assert most * recurrent.CELLS[kind] ** 0.5 == pytest.approx(device.largest_hidden("rnn"), rel=0.01)


def test_half_precision_halves_the_bytes_of_a_weight() -> None:
    assert recurrent.chip("h100").bytes_each == 2
    (row,) = recurrent.rows(Cell("rnn", 512), recurrent.chip("h100"), [1])
    assert row.reload.flop_per_byte == pytest.approx(1.0, rel=0.01)


def test_command_prints_the_limit_as_a_line_and_json(capsys) -> None:
    assert main(["explain", "--roofline", "lstm:4096", "--gpu", "p100", "--batch", "1,64"]) == 0
    text = capsys.readouterr().out
    assert "Register file: 14.7 MB" in text and "does not fit" in text and "22 GPUs" in text
    assert main(["explain", "--roofline", "lstm:512", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "p100" and report["fits"]
    assert [row["batch"] for row in report["batches"]] == list(recurrent.BATCHES)
    assert all(row["gain"] > 1 for row in report["batches"][:5])


def test_the_plot_has_the_register_file_as_a_line_and_says_that_nothing_was_measured(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "rnn.svg"
    assert main(["explain", "--roofline", "gru:1024", "--plot", str(picture)]) == 0
    text = picture.read_text()
    assert "register file: 1020" in text and "CALCULATED, not measured" in text
    assert main(["explain", "--roofline", "gru:1024", "--plot", "/proc/none/rnn.svg"]) == 3


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--roofline", "lstm"], "--roofline"),
        (["--roofline", "conv:64"], "--roofline"),
        (["--roofline", "lstm:0"], "--roofline"),
        (["--roofline", "lstm:99999999"], "--roofline"),
        (["--roofline", "lstm:64", "--gpu", "abacus"], "--gpu"),
        (["--roofline", "lstm:64", "--batch", "0"], "--batch"),
        (["--roofline", "lstm:64", "--plot", "x.gif"], "--plot"),
        (["--batch", "4"], "--batch"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: list[str], field: str, capsys) -> None:
    assert main(["explain", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bench: {field}") and error.count("\n") == 1
