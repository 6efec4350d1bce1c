"""Validation tells a busy machine from a wrong fabric. The figures were recorded on two cores."""

from __future__ import annotations

import importlib.util
import json

import pytest

from cluster.core.config import ROOT

spec = importlib.util.spec_from_file_location("validate_cluster", ROOT / "ansible/files/validate_cluster.py")
validate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(validate)

RIGHT = {"head": (1.0, 1.0), "w1": (1.0, 1.0)}
SHAPERS = "\n".join(
    (
        "shapers 1 fabric0 fabric0=1Gbit ifbfabric0=1Gbit ",
        "Warning: Permanently added 'w1' to the list of known hosts.",
        "shapers 0 fabric0 fabric0=1Gbit ifbfabric0=500Mbit ",
    )
)


def row(wire: float) -> dict:
    return {"node": "head", "to": "w1", "gbps": round(wire / 1.0463, 4), "wire_gbps": wire}


def test_busy_machine_is_a_warning_with_its_reason():
    """Twelve busy loops on two cores: the link keeps its rate for 40 ms, and a tenth of it for long."""
    problem, warning = validate.judge(row(0.78), 1.0, RIGHT, lambda: 0.0997, lambda: 1.068)
    assert problem == ""
    assert warning.startswith("head to w1: 0.78 Gbit/s on the wire, expected 1 within 10%: this machine is busy")
    assert "limited to 0.1" in warning


@pytest.mark.parametrize(
    ("wire", "low", "peak"),
    [
        pytest.param(0.300, 0.100, 0.314, id="throttled to 300 Mbit/s on a quiet machine"),
        pytest.param(0.302, 0.100, 0.369, id="throttled to 300 Mbit/s on a busy machine"),
        pytest.param(0.800, 0.100, 0.869, id="throttled to 800 Mbit/s on a busy machine"),
        pytest.param(0.050, 0.050, 0.055, id="throttled below a tenth of the rate"),
        pytest.param(0.780, 0.070, 1.010, id="loses packets at a low rate"),
        pytest.param(0.780, 0.000, 0.000, id="nothing arrives any more"),
    ],
)
def test_slow_link_is_a_problem_whatever_the_machine_does(wire, low, peak):
    problem, warning = validate.judge(row(wire), 1.0, RIGHT, lambda: low, lambda: peak)
    assert warning == ""
    assert problem.startswith(f"head to w1: {wire:.2f} Gbit/s on the wire, expected 1 within 10%")
    assert "so the machine's load is not the reason" in problem


@pytest.mark.parametrize(
    ("shapers", "words"),
    [
        ({"head": (0.5, 1.0), "w1": (1.0, 1.0)}, "sending on head is limited to 0.5 Gbit/s"),
        ({"head": (1.0, 1.0), "w1": (1.0, 0.9)}, "receiving on w1 is limited to 0.9 Gbit/s"),
        ({"head": (1.0, 1.0), "w1": (1.0, None)}, "receiving on w1 is not limited"),
    ],
)
def test_shaper_with_another_rate_is_a_problem(shapers, words):
    problem, warning = validate.judge(row(0.78), 1.0, shapers, pytest.fail, pytest.fail)
    assert warning == ""
    assert words in problem


@pytest.fixture
def evidence(monkeypatch):
    """Evidence of a busy machine; counts how often it is collected."""
    calls: list[str] = []

    def record(name, value):
        monkeypatch.setattr(validate, name, lambda *_: calls.append(name) or value)

    monkeypatch.setattr(validate, "show", lambda text: None)
    record("at_low_rate", 0.1)
    record("read_shapers", RIGHT)
    record("at_full_rate", 1.03)
    return calls


def test_warned_row_is_marked_and_the_others_are_not(evidence):
    ring = [row(0.78), {"node": "w1", "to": "head", "gbps": 0.956, "wire_gbps": 1.0}]
    problems, warnings = validate.check_rates(ring, ["head", "w1"], 1.0, True, 1.0463)
    assert problems == []
    assert warnings == [ring[0]["warning"]]
    assert "warning" not in ring[1]


def test_links_with_their_rate_need_no_evidence(evidence):
    assert validate.check_rates([row(0.95), row(1.04)], ["head", "w1"], 1.0, True, 1.0463) == ([], [])
    assert evidence == []


@pytest.mark.parametrize("peak", [1.02, 1.2])
def test_shaped_link_that_is_too_fast_is_a_problem_unless_only_the_reader_was_late(evidence, monkeypatch, peak):
    """On two cores with 30 busy processes a link was read at 1.41 Gbit/s that was limited to 1."""
    monkeypatch.setattr(validate, "at_full_rate", lambda *_: peak)
    ring = [row(1.41)]
    problems, warnings = validate.check_rates(ring, ["head", "w1"], 1.0, True, 1.0463)
    assert (len(problems), len(warnings)) == ((1, 0) if peak == 1.2 else (0, 1))
    assert (ring[0].get("warning") in warnings) == (peak == 1.02)


def test_native_link_may_be_faster_than_its_rate(evidence):
    """EC2 lets 'up to 10 Gbit/s' instances burst."""
    assert validate.check_rates([row(1.2), row(0.9)], ["head", "w1"], 1.0, False, 1.0463) == ([], [])
    assert evidence == []


@pytest.mark.parametrize(("reached", "good"), [(92.0, True), (60.0, False)])
def test_native_link_is_measured_with_as_many_connections_as_its_rate_needs(monkeypatch, reached, good):
    started: list[tuple] = []

    def mpirun(nodes, *words):
        started.append(words)
        report = {"end": {"sum_received": {"bits_per_second": reached * 1e9}}}
        return type("Done", (), {"stdout": f"Warning: key\n{json.dumps(report)}"})

    monkeypatch.setattr(validate, "show", lambda text: None)
    monkeypatch.setattr(validate, "mpirun", mpirun)
    ring = [row(22.0)]
    problems, warnings = validate.check_rates(ring, ["head", "w1"], 100.0, False, 1.0)
    assert {words[-2] for words in started} == {"13"}
    assert (ring[0]["wire_gbps"], ring[0]["streams"]) == (reached, 13)
    assert warnings == []
    wrong = "head to w1: 60.00 Gbit/s on the wire with 13 connections, expected at least 85 (85% of 100)"
    assert problems == ([] if good else [wrong])


def test_configured_rates_are_read_from_tc(monkeypatch):
    class Done:
        stdout = SHAPERS

    monkeypatch.setattr(validate, "mpirun", lambda *_: Done)
    found = validate.read_shapers(["head", "w1", "w2"])
    assert found == {"head": (1.0, 0.5), "w1": (1.0, 1.0), "w2": (None, None)}


def test_rates_are_reset_even_if_the_low_measurement_dies(monkeypatch):
    commands: list[tuple] = []
    monkeypatch.setattr(validate, "show", lambda text: None)
    monkeypatch.setattr(validate, "mpirun", lambda nodes, *words: commands.append(words))
    monkeypatch.setattr(validate, "probe", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        validate.at_low_rate(["head", "w1"], row(0.78), 0.1, 1.0463)
    assert commands == [("sudo", "-n", "/usr/local/sbin/fabric-rate", "reset")]


def test_probe_measures_a_link(monkeypatch, tmp_path):
    """Both ranks on this machine; mpirun and sudo are stand-ins."""
    tools = {
        "mpirun": '#!/bin/sh\nshift 2\nOMPI_COMM_WORLD_RANK=0 "$@" &\nOMPI_COMM_WORLD_RANK=1 "$@"\nwait\n',
        "sudo": "#!/bin/sh\n",
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(validate, "PROBE_SECONDS", 0.6)
    mean, highest = validate.probe(["localhost", "w1"], {"node": "w1", "to": "localhost"}, "reset")
    assert 0 < mean <= 1.01 * highest


def test_probe_that_fails_found_nothing(monkeypatch):
    class Done:
        stdout = "mpirun was unable to start"

    monkeypatch.setattr(validate, "mpirun", lambda *_: Done)
    assert validate.probe(["head", "w1"], row(0.78), "reset") == (0.0, 0.0)


def test_slow_links_are_measured_again_and_the_best_of_each_counts(monkeypatch):
    """Each start of mpi-hello has its own luck; the share is read only once."""
    answers = [[0.5, 0.95], [0.92, 0.4], [0.1, 0.1]]
    files: list[object] = []

    def run_hello(nodes, low, high, file):
        files.append(file)
        return {"ranks": 2, "sum": 1, "wrong": 0, "gbps": answers[len(files) - 1]}, {"head": ["x"]}, ""

    monkeypatch.setattr(validate, "run_hello", run_hello)
    monkeypatch.setattr(validate, "show", lambda text: None)
    found, seen, problem = validate.measure(["head", "w1"], 0.9, 1.1, "token")
    assert (found["gbps"], seen, problem) == ([0.92, 0.95], {"head": ["x"]}, "")
    assert files == ["token", None]


def test_step_that_cannot_be_shown_stops_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(validate, "CURRENT", tmp_path / "none/current")
    validate.show("measuring")
    monkeypatch.setattr(validate, "CURRENT", tmp_path / "current")
    validate.show("measuring")
    assert (tmp_path / "current").read_text() == "measuring"


UCX = """\
[w1:01234:0:1234] ucp_worker.c:1855 UCX  ERROR no auxiliary transport to <no debug data>: rc_verbs/rxe0:1
[w1:01234] pml_ucx.c:419  Error: ucp_ep_create(proc=1) failed: Destination is unreachable
==== backtrace (tid:   1234) ====
 0  /lib/x86_64-linux-gnu/libucs.so.0(ucs_handle_error+0x2e4) [0x7f1c2a0e5f64]
 1 0x0000000000038d60 __restore_rt()  ???:0
=================================
[w1:01234] *** Process received signal ***
[w1:01234] Signal: Aborted (6)
[w1:01234] [ 0] /lib/x86_64-linux-gnu/libpthread.so.0(+0x13140)[0x7f1c2a2f1140]
[w1:01234] [ 1] /lib/x86_64-linux-gnu/libc.so.6(gsignal+0x141)[0x7f1c29fd4ce1]
[w1:01234] *** End of error message ***
--------------------------------------------------------------------------
mpirun noticed that process rank 1 with PID 1234 on node w1 exited on signal 6 (Aborted).
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (UCX, "[w1:01234:0:1234] ucp_worker.c:1855 UCX ERROR no auxiliary transport"),
        (
            "Warning: Permanently added 'w1'.\nssh: connect to host w1 port 22: No route to host\n",
            "ssh: connect to host",
        ),
        ("odd words\n", "odd words"),
        ("", "no output"),
    ],
    # A name with the word ERROR is a failed test to tests/stages.py.
    ids=["ucx", "ssh", "other", "none"],
)
def test_error_of_mpi_is_shown_and_not_its_backtrace(text, first):
    shown = validate.cause(text)
    assert shown.startswith(first)
    assert "\n" not in shown
    assert not any(word in shown for word in ("backtrace", "libpthread", "mpirun noticed", "0x"))
