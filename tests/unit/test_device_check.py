"""The check of GPUs after a deploy: on a fake of torch.cuda, and on reports of ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from fake_cuda import Machine, Misuse
from test_fit import cluster

from bench.worker import accelerator, protocol
from bench.worker.protocol import DeviceReport, DevicesDone, Failed
from cluster import device_check
from cluster.core.errors import InfraError

RANK = DeviceReport("n0", 0, 2, "NVIDIA L4", "580.95.05", "13.0", "2.27.7", "bf16", True, {"PHB": 1})


@pytest.fixture(params=[(8, 0), (7, 5)], ids=["ampere", "turing"])
def check(request, monkeypatch):
    """The worker's program and the machine as local rank 5 sees it."""
    machine = Machine(rank=5, capability=request.param)
    monkeypatch.setitem(sys.modules, "torch", machine.torch())
    before = set(sys.modules)
    for name in [name for name in before if name.startswith("bench.worker") and name != "bench.worker.protocol"]:
        monkeypatch.delitem(sys.modules, name)
    from bench.worker import check_devices

    yield machine, check_devices
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_every_rank_multiplies_on_its_own_gpu(check):
    machine, program = check
    assert program.product(program.accelerator.make(True, 5), side=8) == (
        "bf16" if machine.capability >= (8, 0) else "fp32",
        True,
    )
    assert [number for number, busy in enumerate(machine.compute) if busy] == [5]
    # It waited for the product before it compared.
    assert machine.host >= machine.compute[5]


def test_a_gpu_that_multiplies_wrongly_is_noticed(check):
    machine, program = check
    machine.broken = True
    assert program.product(program.accelerator.make(True, 5), side=8)[1] is False


def test_a_product_on_the_gpu_of_another_rank_is_refused(check):
    _, program = check
    device = program.accelerator.make(True, 5)
    device.place = "cuda:0"
    with pytest.raises(Misuse, match="rank 5 uses device 0"):
        program.product(device, side=8)


def test_report_names_gpu_cuda_and_nccl(check):
    _, program = check
    found = program.accelerator.make(True, 5).facts()
    assert found == {"name": "NVIDIA A100-SXM4-80GB", "cuda": "13.0", "nccl": "2.27.7"}


def found(*ranks: DeviceReport, seconds: float = 0.1, errors: int = 0) -> DevicesDone:
    return DevicesDone(list(ranks), 256 << 20, [seconds] * 5, errors)


def four(**changes: object) -> list[DeviceReport]:
    """Two GPUs on each of two nodes; the last one differs."""
    ranks = [replace(RANK, node=f"n{node}", local_rank=local) for node in (0, 1) for local in (0, 1)]
    return [*ranks[:3], replace(ranks[3], **changes)]


def test_sound_gpus_pass_and_the_floor_follows_from_the_fabric():
    there = cluster(2, 2)
    there.fabrics[there.active_fabric].rate_gbps = 50
    checked = device_check.judge(found(*four()), there)
    assert checked.problems == []
    # 2 (N-1)/N of 256 MiB in 0.1 s.
    assert checked.bus_gbps == pytest.approx(1.5 * (256 << 20) * 8 / 0.1 / 1e9)
    assert checked.floor_gbps == pytest.approx(device_check.FLOOR["tcp"] * 50)
    assert device_check.rows(checked.result())[0] == (
        *("n0", "0", "NVIDIA L4", "580.95.05", "13.0", "2.27.7", "bf16 right", "PHB x1"),
    )


@pytest.mark.parametrize(
    ("done", "problem"),
    [
        (found(*four(seen=1)), "n1: torch sees 1 GPUs, cluster.yml has 2"),
        (found(*four(right=False)), "n1: GPU 1 multiplies wrongly: replace it"),
        (found(*four(), errors=3), "NCCL: 3 elements of an all-reduce over 4 GPUs are wrong"),
        (found(*four(), seconds=10), "NCCL: 0.32 Gbit/s of bus bandwidth over 4 GPUs on 2 nodes, 20 is the least on"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(done, problem):
    there = cluster(2, 2)
    there.fabrics[there.active_fabric].rate_gbps = 50
    (line,) = device_check.judge(done, there).problems
    assert problem in line


def test_one_node_has_no_floor():
    done = found(*four()[:2], seconds=100)
    assert device_check.judge(done, cluster(2)).problems == []


def test_a_node_has_a_rank_per_gpu_also_where_others_have_more():
    words = device_check.launch(cluster(0, 2, 8), device_check.tuning.Tuning(), cuda=True)
    assert words[words.index("-H") + 1] == "n1:2,n2:8"
    assert words[words.index("-np") + 1] == "10"
    assert "NCCL_NET=Socket" in words


@pytest.mark.parametrize(
    ("out", "err", "message"),
    [
        (Failed("n1: torch sees 1 of 2 GPUs as the training account"), "", "GPUs: n1: torch sees 1 of 2 GPUs as"),
        (None, "n1: NCCL WARN Failed to initialize NET plugin\nRuntimeError: x", "GPUs: n1: NCCL WARN Failed to init"),
        (None, "", "GPUs: no output"),
    ],
)
def test_a_launch_that_fails_says_why(monkeypatch, out, err, message):
    text = "" if out is None else f"@bench {protocol.json.dumps({'event': type(out).__name__, **asdict(out)})}\n"
    done = subprocess.CompletedProcess([], 1, text, err)
    monkeypatch.setattr(device_check.worker_files, "install", lambda *_: None)
    monkeypatch.setattr(device_check.ssh, "gather", lambda commands, timeout: dict.fromkeys(commands, done))
    with pytest.raises(InfraError, match=message):
        device_check.validate("x", cluster(2, 2))


def test_the_event_survives_the_way_to_the_controller():
    done = found(*four())
    line = f"@bench {protocol.json.dumps({'event': 'DevicesDone', **asdict(done)})}"
    assert protocol.parse(line) == done
    assert accelerator.Cpu().facts()["name"] == "CPU"
