"""`bench comm` without a cluster: sizes, bandwidths, bad input."""

from __future__ import annotations

import argparse

import pytest
from test_inventory import OUTPUT

from bench.comm import command as comm
from bench.comm import measure
from bench.sweep.launch import SpecFile
from bench.worker import links
from bench.worker.protocol import CaseDone
from cluster.core import contract, entry
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.tuning import Tuning

CLUSTER = contract.parse(OUTPUT)


def arguments(*words: str) -> argparse.Namespace:
    parser = entry.Parser()
    comm.configure(parser)
    return parser.parse_args(words)


def test_sizes_have_suffixes_and_bad_ones_are_refused():
    assert [comm.size(text) for text in ("4K", "64m", "512")] == [4096, 64 << 20, 512]
    for text in ("", "four", "2", "-4K"):
        with pytest.raises(argparse.ArgumentTypeError):
            comm.size(text)


def test_sizes_grow_fourfold_up_to_the_largest():
    assert measure.sizes(4096, 70_000) == [4096, 16384, 65536]


@pytest.mark.parametrize(("name", "factor"), [("all_reduce", 1.5), ("broadcast", 1.0), ("all_gather", 0.75)])
def test_bus_factor_is_that_of_nccl_tests(name, factor):
    assert measure.Case(name, 4096).bus_factor(4) == factor


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--fabric", "40g"), "--fabric"),
        (("--nodes", "1"), "--nodes"),
        (("--nodes", "13"), "--nodes"),
        (("--from", "1G"), "--from"),
    ],
)
def test_bad_option_is_named_before_anything_runs(monkeypatch, words, option):
    monkeypatch.setattr(comm, "read_output", lambda _: CLUSTER)
    with pytest.raises(UserError) as caught:
        comm.run(arguments(*words))
    assert str(caught.value).startswith(option)


@pytest.fixture
def work(monkeypatch):
    """Two nodes on which every case takes 64 ms. `sent` has the launches."""
    made = measure.Communication.__new__(measure.Communication)
    made.contract, made.fabric, made.scale, made.rate_mbit = CLUSTER, "1g", 4.0, 250.0
    made.names, made.slots, made.progress, made.measured = ["head", "w1"], 0, Progress(), {}
    made.sent = []

    class Installs:
        def install(self, names, spec):
            made.spec = spec
            return SpecFile("x", "y")

    def events(launch, limit):
        made.sent.append(launch)
        return [CaseDone(case.id, [0.064] * 8, 0) for case in made.spec.launches[0].cases]

    made.executor = Installs()
    monkeypatch.setattr(made, "events", events)
    return made


def test_rows_are_in_units_of_the_modelled_cluster(work):
    """At scale factor 4, a quarter of the bytes takes as long as all bytes at the full rate."""
    (row,) = work.collectives("ddp", Tuning(), [measure.Case("all_reduce", 8_000_000)], 1.0)
    assert row["busbw_gbps"] == pytest.approx(1.0)
    assert row["errors"] == 0
    assert work.sent[0].hosts == ("head", "w1")


def test_horovod_and_the_engine_that_it_stands_for_are_measured_once(work):
    """Tuned, `horovod` is Gloo for large messages and untuned MPI for small ones."""
    cases = [measure.Case("all_reduce", size) for size in (4096, 64 << 20)]
    rows = [row for name in comm.ENGINES[:3] for row in work.collectives(name, Tuning(), cases, 1.0)]
    assert [(row["engine"], row["size"]) for row in rows] == [
        (name, size) for name in ("horovod", "horovod-gloo", "horovod-mpi") for size in (4096, 64 << 20)
    ]
    # horovod: one launch each; Gloo: only the small message; tuned MPI: both.
    assert [launch.engine for launch in work.sent] == ["horovod-mpi", "horovod-gloo", "horovod-gloo", "horovod-mpi"]


@pytest.mark.parametrize(
    ("out", "err", "why"),
    [
        ('{"start": {}, "end": {}, "error": "unable to connect to server"}', "", "unable to connect to server"),
        ("", "ssh: connect to host w1\nNo route to host\n", "No route to host"),
        ("{", "", "{"),
        ("", "", "no output"),
    ],
)
def test_a_link_that_cannot_be_measured_gives_its_reason_not_the_json_of_iperf3(out: str, err: str, why: str) -> None:
    assert links.reason(out, err) == why
