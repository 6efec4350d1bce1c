"""Several emulated GPUs per node: the link between them, its calibration, and the factors of the scale model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from test_sweep import CLUSTER, launches, load, point_of

from bench.catalogue import gpu_rates, interconnect, models
from bench.plan import unfold
from bench.plan.schema import Published
from bench.results.trial import Point
from bench.worker import node_link

S_PER_BYTE = 1e-6


@dataclass
class Tensor:
    """What the link asks of a tensor."""

    bytes: int

    def numel(self) -> int:
        return self.bytes // 4

    def element_size(self) -> int:
        return 4


@dataclass
class Instant:
    """An engine whose sums take no time."""

    holds_weights, overlaps, exchanges_next = False, False, False
    size: int = 4
    sent: list[str] = field(default_factory=list)

    def begin(self, scale: float) -> None: ...

    def submit(self, name: str, tensor: Tensor) -> None:
        self.sent.append(name)

    def submit_bytes(self, name: str, payload: Tensor) -> None:
        self.sent.append(name)

    def wait(self) -> None: ...

    def wait_bytes(self) -> list[Tensor]:
        return []


def test_sums_take_as_long_as_their_bytes_on_the_link():
    engine = node_link.wrap(Instant(), S_PER_BYTE)
    for wait in (engine.wait, engine.wait_bytes):
        engine.begin(1.0)
        begin = time.perf_counter()
        engine.submit("a", Tensor(20_000))
        engine.submit_bytes("b", Tensor(30_000))
        wait()
        assert 0.05 <= time.perf_counter() - begin < 0.08
    assert engine.sent == ["a", "b", "a", "b"]
    assert engine.size == 4


def test_tensor_that_was_carried_during_compute_delays_nothing():
    engine = node_link.wrap(Instant(), S_PER_BYTE)
    engine.begin(1.0)
    engine.submit("a", Tensor(20_000))
    time.sleep(0.03)
    begin = time.perf_counter()
    engine.wait()
    assert time.perf_counter() - begin < 0.01


def test_one_gpu_per_node_has_no_link():
    engine = Instant()
    assert node_link.wrap(engine, 0.0) is engine


def hkbu(method: str, gpus: int) -> list[float]:
    rows = [row for row in gpu_rates.published("hkbu-2020") if row["method"] == method and int(row["gpus"]) == gpus]
    return [float(row["images_per_second"]) for row in rows]


def test_pcie_gives_the_published_rates_of_four_gpus_in_a_node():
    """Without overlap a step is compute plus one sum of all gradients."""
    (alone, *_), four = hkbu("bsp", 1), hkbu("bsp", 4)
    assert len(four) == 3
    sent = 2 * 3 / 4 * models.get("resnet50").gradient_bytes
    step = 64 / alone + sent / (1e9 * interconnect.GBYTES["pcie"])
    for published in four:
        assert 4 * 64 / step == pytest.approx(published, rel=0.01)


def times(tmp_path, **changes: object) -> dict[str, float]:
    """Compression -> seconds that the link needs for all gradients, in the modelled cluster."""
    plan = load(tmp_path, nodes=[2], gpus_per_node=4, compressions=["none", "fp16", "1bit"], **changes)
    _, part = launches(plan)["1g", 2]
    found = {}
    for trial in part.trials:
        size = {"none": 4.0, "fp16": 2.0, "1bit": 1 / 8}[trial.compression] * models.get("resnet50").parameters
        found[trial.compression] = trial.node_s_per_byte / trial.scale / trial.slowdown * size
    return found


def test_link_carries_the_ring_of_all_ranks(tmp_path):
    slow = times(tmp_path)
    assert slow["none"] == pytest.approx(2 * 7 / 8 * 102228128 / 6.4e9)
    assert slow["fp16"] == pytest.approx(slow["none"] / 2)
    assert slow["1bit"] == pytest.approx(7 * 102228128 / 32 / 6.4e9)
    assert times(tmp_path, interconnect="nvlink")["none"] == pytest.approx(slow["none"] * 6.4 / 40)


@pytest.mark.parametrize(("device", "gpus", "expected"), [("p100", 4, 6.4), ("p100", 8, 40), ("a100", 2, 200)])
def test_usual_link_follows_from_the_gpu_and_their_number(tmp_path, device, gpus, expected):
    plan = load(tmp_path, gpus_per_node=gpus, device=f"emulated:{device}")
    point = next(unfold.points(plan, CLUSTER)).points[0]
    assert unfold.node_gbytes(plan, point) == expected
    assert unfold.node_gbytes(plan, point.model_copy(update={"gpus_per_node": 1})) is None
    assert unfold.node_gbytes(plan, point.model_copy(update={"device": "cuda"})) is None


def test_many_ranks_run_slower_and_no_rank_gets_more_bytes(tmp_path):
    links = {"ten": {"rate_gbps": 10}}
    found = {}
    for gpus in (1, 4):
        plan = load(tmp_path, nodes=[4], gpus_per_node=gpus, fabrics=["1g", "ten"], links=links)
        for (fabric, _), (job, _) in launches(plan).items():
            found[fabric, gpus] = job.scale * job.slowdown, job.slowdown
    assert found["ten", 4][0] == pytest.approx(4 * found["ten", 1][0])
    assert found["ten", 4][1] > found["ten", 1][1] > 1
    assert found["1g", 4][1] == found["1g", 1][1] == 1


def test_compute_time_can_be_given_per_model(tmp_path):
    plan = load(tmp_path, models=["resnet50", "vgg16"], compute_ms={"vgg16": 488.9})
    group = next(unfold.points(plan, CLUSTER))
    given = {point.model: unfold.compute_ms(plan, point) for point in group.points}
    assert given["vgg16"] == (488.9, "measured, given in the plan")
    assert given["resnet50"][0] == pytest.approx(1000 * 32 / 195)


def compared(point: Point, **changes: object) -> bool:
    values = {"fabric": "1g", "nodes": 4, "batch": 32, "step_ms": 1.0, "source": "a table"}
    return Published.model_validate({**values, **changes}).same(point)


def test_published_figure_belongs_to_the_points_that_it_names():
    point = point_of(4).model_copy(update={"batch": 32, "gpus_per_node": 4})
    assert compared(point)
    assert compared(point, gpus_per_node=4, model="resnet50", compression="none")
    for other in ({"gpus_per_node": 1}, {"model": "vgg16"}, {"compression": "fp16"}, {"nodes": 2}):
        assert not compared(point, **other)


def test_published_rate_is_the_time_of_a_step():
    point = point_of(4).model_copy(update={"batch": 64, "gpus_per_node": 4})
    theirs = Published(fabric="1g", nodes=4, batch=64, images_per_second=3785.0, source="a table")
    assert theirs.milliseconds(point) == pytest.approx(270.5, abs=0.1)
