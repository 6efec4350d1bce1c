"""nccl-tests in the table of `bench comm`, and the fetch of its source by the controller."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_fit import cluster

from bench.comm import command as comm
from bench.comm import measure, nccl_tests
from bench.sweep import launch as launchers
from bench.sweep.launch import SpecFile
from cluster import nccl_tests as source
from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.tuning import Tuning

OUTPUTS = Path(__file__).parents[1] / "fixtures/nccl-tests"


def read(name: str) -> list[dict]:
    return nccl_tests.rows((OUTPUTS / name).read_text())


def test_table_is_read_in_the_units_of_bench_comm():
    small, _, large = read("all-reduce.txt")
    assert (small["size"], small["count"], small["type"], small["errors"]) == (4096, 1024, "float", 0)
    # 2.5 GB/s are 20 Gbit/s.
    assert (large["time_us"], large["algbw_gbps"], large["busbw_gbps"]) == (26843.5, 20.0, 20.0)


def test_wrong_elements_are_counted_and_unchecked_ones_are_not():
    assert [row["errors"] for row in read("wrong.txt")] == [0, 0, 117]
    assert [row["errors"] for row in read("unchecked.txt")] == [0, 0, 0]


def test_other_output_has_no_rows():
    assert nccl_tests.rows("head: Test NCCL failure common.cu:1000 'unhandled system error'\n4096 1024 x\n") == []


@pytest.fixture
def work(monkeypatch):
    """Two nodes of four GPUs, on which mpirun prints a recorded table."""
    work = measure.Communication.__new__(measure.Communication)
    there = cluster(4, 4)
    work.contract, work.fabric, work.scale, work.rate_mbit = there, there.active_fabric, 1.0, None
    work.names, work.slots, work.progress = ["n0", "n1"], 4, Progress()
    work.executor = type("Installs", (), {"install": lambda self, names, spec: SpecFile("x", "y")})()
    started = []

    def output(launch, limit):
        started.append(launch)
        return (OUTPUTS / "all-reduce.txt").read_text()

    monkeypatch.setattr(work, "output", output)
    monkeypatch.setattr(nccl_tests, "installed", lambda contract, names: True)
    return work, started


def test_it_runs_on_the_fabric_and_its_rows_join_the_table(work, capsys):
    communication, started = work
    rows = communication.nccl_tests(Tuning(), ["all_reduce"], 4096, 67108864)
    (launch,) = started
    words = launchers.argv(launch)
    assert words[words.index("fabric") + 1 :][:5] == ["/opt/nccl-tests/all_reduce_perf", "-b", "4096", "-e", "67108864"]
    assert words[words.index("-np") + 1] == "8"
    assert "NCCL_NET=Socket" in words
    assert {row["engine"] for row in rows} == {"nccl-tests"}
    ring = [{"node": name, "to": name, "gbps": 25.0} for name in ("n0", "n1")]
    card = {"interface": "eth1", "driver": "ena", "numa": 0}
    topology = [{"node": row["node"], "cores": 8, "numa_nodes": 1, "gpus": [], "card": card} for row in ring]
    shown = {"kind": "real", "scale": 1.0, "fabric": "f", "rate_gbps": 25.0, "ring": ring, "topology": topology}
    comm.show({**shown, "rows": [{**row, "link_share": row["busbw_gbps"] / 25} for row in rows]})
    text = capsys.readouterr().out
    assert "nccl-tests" in text
    assert "80.0%" in text


def test_without_it_or_on_a_shaped_fabric_there_are_no_rows(work, monkeypatch):
    communication, started = work
    communication.scale = 4.0
    assert communication.nccl_tests(Tuning(), ["all_reduce"], 4096, 4096) == []
    communication.scale = 1.0
    monkeypatch.setattr(nccl_tests, "installed", lambda contract, names: False)
    assert communication.nccl_tests(Tuning(), ["all_reduce"], 4096, 4096) == []
    assert started == []


@pytest.fixture
def forge(monkeypatch, tmp_path):
    """A public forge, which notes what it was asked for, and an empty cache. `content` None: it cannot be reached."""
    forge = SimpleNamespace(content=b"the source", asked=[])
    pinned = {"nccl_tests": "2.17.6", "nccl_tests_sha256": hashlib.sha256(b"the source").hexdigest()}
    monkeypatch.setattr(source, "CACHE", tmp_path)
    monkeypatch.setattr(source, "versions", lambda: pinned)

    def urlopen(url, timeout):
        forge.asked.append(url)
        if forge.content is None:
            raise OSError("Name or service not known")
        return io.BytesIO(forge.content)

    monkeypatch.setattr(source.urllib.request, "urlopen", urlopen)
    return forge


def test_the_controller_fetches_the_source_once(forge):
    source.fetch(Progress())
    source.fetch(Progress())
    assert forge.asked == ["https://github.com/NVIDIA/nccl-tests/archive/v2.17.6.tar.gz"]
    assert source.source().read_bytes() == b"the source"


def test_without_internet_a_deploy_goes_on_and_says_where_the_file_belongs(forge, capsys):
    forge.content = None
    source.fetch(Progress())
    assert f"to have it, copy the file to {source.source()}" in capsys.readouterr().out.replace("\n", " ")
    assert not source.source().exists()


@pytest.mark.parametrize("copied", [False, True])
def test_another_file_in_its_place_is_refused(forge, copied):
    forge.content = b"another"
    if copied:
        source.source().parent.mkdir()
        source.source().write_bytes(b"another")
    with pytest.raises(InfraError, match=r"does not match versions\.yml nccl_tests_sha256"):
        source.fetch(Progress())
    assert source.source().exists() == copied
