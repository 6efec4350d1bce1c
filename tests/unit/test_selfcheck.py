"""`bench selfcheck`: what differs from what we expect is found, and written first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_device_check import RANK, found, four
from test_fit import cluster

from bench.plan import check, unfold
from bench.results.trial import Breakdown, Interval, Point, Steadiness, Trial
from bench.selfcheck import command, expectations, page
from bench.selfcheck.expectations import Finding
from cluster import device_check
from cluster.core.errors import InfraError
from cluster.core.progress import Progress


def trial(nodes: int = 1, gpus: int = 1, engine: str = "horovod-mpi", compute: float = 100.0, **changes: Any) -> Trial:
    """A trial on GPUs whose step is compute and exposed communication."""
    exposed = changes.pop("exposed", 0.5 if nodes * gpus == 1 else 8.0)
    drift, kind = changes.pop("drift", 0.001), changes.pop("kind", "cuda")
    step = Interval(median=compute + exposed, low=compute, high=compute + exposed)
    parts = Breakdown(compute=compute, exposed_comm=exposed, data_wait=0, straggler_wait=0)
    point = Point(
        **{"fabric": "f", "rate_gbps": 25, "nodes": nodes, "gpus_per_node": gpus, "batch": 32, "model": "resnet50"},
        **{"engine": engine, "compression": "none", "device": kind, "data": "synthetic", "repeat": 0},
    )
    given = {"id": point.id, "point": point, "status": "ok", "kind": kind, "started": "now", "step_ms": step}
    steady = Steadiness(drift=drift, spread=[0.01, 0.01])
    return Trial.model_validate({**given, "breakdown_ms": parts, "steadiness": steady, "precision": "fp32", **changes})


def differing(findings: list[Finding]) -> list[str]:
    return [one.subject for one in findings if one.ok is False]


def node(name: str, gpus: int = 2, speed: int | None = 25_000, numa: int = 0, adapters: tuple[str, ...] = ()) -> dict:
    card = {"interface": "eth1", "speed_mbit": speed, "numa": 0, "adapters": list(adapters)}
    return {"node": name, "card": card, "gpus": [{"bus": f"0000:{n}b:00.0", "numa": numa} for n in range(gpus)]}


def test_cards_and_gpus_that_differ_are_named():
    there = cluster(2, 2)
    there.fabrics[there.active_fabric].rate_gbps = 25
    assert differing(expectations.cards(there, [node("n0"), node("n1")])) == []
    assert differing(expectations.cards(there, [node("n0", gpus=1), node("n1")])) == ["n0: GPUs (nvidia-smi)"]
    assert differing(expectations.cards(there, [node("n0", speed=10_000)])) == ["n0: speed of eth1"]
    assert differing(expectations.cards(there, [node("n0", numa=1)])) == ["n0: GPUs on the card's NUMA node"]
    # A virtual card tells no speed.
    assert differing(expectations.cards(there, [node("n0", speed=None)])) == []


def test_a_card_without_rdma_on_a_verbs_fabric_differs():
    there = cluster(2, 2)
    there.fabrics[there.active_fabric].transport = "verbs"
    assert differing(expectations.cards(there, [node("n0")])) == ["n0: RDMA ports of eth1"]
    assert differing(expectations.cards(there, [node("n0", adapters=("mlx5_0:1",))])) == []


@pytest.mark.parametrize(
    ("done", "subject"),
    [
        (found(*four()), None),
        (found(*four(right=False)), "a product on all 4 GPUs"),
        (found(*four(), errors=1), "all-reduce over 4 GPUs"),
        (found(*four(), seconds=10), "its bus bandwidth"),
        (found(*four(driver="570.1")), "GPU, driver, CUDA and NCCL"),
    ],
)
def test_devices_that_differ_are_named(done, subject):
    there = cluster(2, 2)
    there.fabrics[there.active_fabric].rate_gbps = 25
    checked = device_check.judge(done, there)
    assert differing(expectations.devices(checked, cuda=True)) == ([subject] if subject else [])


def test_without_gpus_nothing_is_expected_of_bandwidth_and_drivers():
    checked = device_check.judge(found(replace(RANK, driver="")), cluster(0))
    assert {one.ok for one in expectations.devices(checked, cuda=False)} == {True, None}


SOUND = [trial(), trial(2, 2), trial(engine="ddp"), trial(2, 2, engine="ddp")]


@pytest.mark.parametrize(
    ("measured", "subject"),
    [
        (SOUND, None),
        ([trial(exposed=3.0)], "horovod-mpi on 1 x 1: exposed communication"),
        # Compute contains communication.
        ([trial(), trial(2, 2, compute=110.0)], "horovod-mpi on 2 x 2: compute"),
        ([trial(2, 2, exposed=40.0), trial(2, 2, engine="ddp")], "horovod-mpi on 2 x 2: step"),
        ([trial(drift=-0.05)], "horovod-mpi on 1 x 1: drift"),
        (
            [trial(2, 2, status="failed", error="traffic went over eth0 on n1")],
            "horovod-mpi on 2 x 2: trial and its proof of transport",
        ),
    ],
)
def test_trials_that_differ_are_named(measured, subject):
    assert differing(expectations.trials(measured, "unknown gpu")) == ([subject] if subject else [])


def test_a_gpu_far_from_its_published_rate_differs():
    usual = expectations.published_ms(trial(), "v100")
    assert usual
    near = trial(compute=usual)
    assert differing(expectations.trials([near], "V100")) == []
    assert differing(expectations.trials([trial(compute=3 * usual)], "v100")) == ["horovod-mpi on 1 x 1: step"]
    assert expectations.published_ms(near, "unknown gpu") is None


def test_nccl_tests_are_compared_at_the_largest_common_size():
    rows = [{"engine": "nccl", "size": size, "busbw_gbps": 10.0} for size in (1, 2, 3)]
    theirs = [{"engine": "nccl-tests", "size": size, "busbw_gbps": gbps} for size, gbps in ((1, 99.0), (2, 11.0))]
    assert [one.ok for one in expectations.beside_nccl_tests(rows + theirs)] == [True]
    theirs[1]["busbw_gbps"] = 20.0
    assert [one.ok for one in expectations.beside_nccl_tests(rows + theirs)] == [False]
    assert [one.ok for one in expectations.beside_nccl_tests(rows)] == [None]


@pytest.mark.parametrize(("gpus", "points"), [((0, 0, 0), 2), ((4, 4), 8), ((0, 1, 1), 4), ((8,), 4)])
def test_plan_has_one_device_and_all_and_takes_less_than_five_minutes(gpus, points):
    plan = command.plan_for(there := cluster(*gpus))
    check.check(plan, there, len(there.compute))
    groups = list(unfold.points(plan, there))
    assert sum(len(group.points) for group in groups) == points
    # A launch, and the warm-up that takes as long as the measurement.
    assert sum(10 + 2 * plan.seconds * len(group.points) for group in groups) < 240


def test_a_part_that_fails_is_a_finding_and_the_next_one_starts():
    collect = command.Collector(Progress())
    with collect.part("cards"):
        raise InfraError("node w1: no answer")
    with collect.part("devices"):
        collect.findings.append(Finding("x", "1", "1", ok=True))
    assert [(one.subject, one.ok) for one in collect.findings] == [("cards", False), ("x", True)]


def test_the_file_begins_with_what_differs():
    findings = [Finding("a", "1", "1", ok=True), Finding("b", "2", "3", ok=False), Finding("c", "4", "?", ok=None)]
    text = page.markdown(findings, {"env": "aws", "created": "now"})
    assert "3 checks: 1 differ, 1 as expected, 1 with nothing to compare" in text
    assert text.index("- b: expected 2; found 3") < text.index("- a: expected 1") < text.index("- c: ")
    assert '"env": "aws"' in text
