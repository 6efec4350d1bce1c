"""What a rank does with its GPU, on a fake of torch.cuda: its own device only, and times that keep compute and
communication apart."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from fake_cuda import DEVICES, Machine, Misuse

from bench.sweep import record
from bench.worker import accelerator
from bench.worker.protocol import LaunchSpec, RankReport, Step
from bench.worker.step_timer import StepTimer

WORKER = Path(accelerator.__file__).parent
LAYERS, FORWARD, BACKWARD, UPDATE = 50, 0.02, 0.04, 0.004


@pytest.fixture
def machine(monkeypatch):
    """The machine as local rank 5 sees it."""
    machine = Machine(rank=5)
    monkeypatch.setitem(sys.modules, "torch", machine.torch())
    before = set(sys.modules)
    yield machine
    for name in set(sys.modules) - before:
        # These modules have imported the fake.
        del sys.modules[name]


class Training:
    """A step whose gradients take `exchange` seconds to sum, of which `delay` after the last one is ready."""

    def __init__(self, machine: Machine, exchange: float = 0.0, delay: float = 0.0, ddp: bool = False, copy=None):
        self.machine, self.exchange, self.delay, self.ddp, self.copy = machine, exchange, delay, ddp, copy
        self.timer = StepTimer(accelerator.make(True, machine.rank), clock=lambda: machine.host)

    def fetch(self) -> bool:
        if self.copy:
            self.machine.kernel(self.copy)
        return bool(self.copy)

    def backward(self) -> None:
        for _ in range(LAYERS):
            self.machine.kernel(FORWARD / LAYERS)
        for _ in range(LAYERS):
            self.machine.kernel(BACKWARD / LAYERS)
            self.timer.gradient()
            if self.exchange:
                self.machine.collective(self.exchange / LAYERS)
        if self.delay:
            self.machine.collective(self.delay)
        if self.ddp:
            self.machine.stream_waits_for_nccl()

    def sum(self) -> None:
        if not self.ddp:
            self.machine.host_waits_for_nccl()

    def update(self) -> None:
        self.machine.kernel(UPDATE)

    def step(self) -> Step:
        return self.timer.step(self)


def parts(training: Training):
    step = training.step()
    return step, record.breakdown([RankReport("head", 5, [step], {})])


@pytest.mark.parametrize("ddp", [False, True])
def test_on_one_gpu_exposed_communication_is_under_two_percent_of_the_step(machine, ddp):
    step, found = parts(Training(machine, ddp=ddp))
    assert found.compute == pytest.approx((FORWARD + BACKWARD + UPDATE) * 1e3, rel=0.02)
    assert found.exposed_comm < 0.02 * step.total * 1e3


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("delay", [0.005, 0.5])
def test_a_delay_in_communication_raises_exposed_by_it_and_leaves_compute_unchanged(machine, ddp, delay):
    # NCCL is the slower one in both runs, so that nothing of the delay hides behind compute.
    _, before = parts(Training(machine, exchange=0.1, ddp=ddp))
    _, after = parts(Training(machine, exchange=0.1, ddp=ddp, delay=delay))
    assert after.compute == pytest.approx(before.compute, abs=0.1)
    assert after.exposed_comm - before.exposed_comm == pytest.approx(delay * 1e3, abs=0.1)


@pytest.mark.parametrize("ddp", [False, True])
def test_communication_begins_when_the_first_gradient_is_there_not_when_it_is_queued(machine, ddp):
    """The host queues the whole step long before the device computes it."""
    step = Training(machine, exchange=0.1, ddp=ddp).step()
    assert step.communication == pytest.approx(0.1, rel=0.02)


def test_hidden_communication_is_not_exposed(machine):
    step, found = parts(Training(machine, exchange=0.01))
    assert found.exposed_comm < 0.02 * step.total * 1e3


def test_the_copy_of_images_to_the_device_is_wait_for_data(machine):
    step = Training(machine, copy=0.03).step()
    assert step.data_wait == pytest.approx(0.03, rel=0.02)
    assert step.compute == pytest.approx(FORWARD + BACKWARD + UPDATE, rel=0.02)


def test_a_rank_without_a_gpu_of_its_own_is_refused(machine):
    with pytest.raises(RuntimeError, match=f"local rank 8 has no GPU of its own: torch sees {DEVICES}"):
        accelerator.make(True, DEVICES)


def test_the_fake_refuses_work_and_waits_on_the_device_of_another_rank(machine):
    with pytest.raises(Misuse, match="rank 5 uses device 0"):
        machine.kernel(1.0)
    with pytest.raises(Misuse, match="rank 5 uses device 4"):
        accelerator.make(True, 4)
    mark = accelerator.make(True, 5).mark()
    mark.device = 0
    with pytest.raises(Misuse, match="rank 5 uses device 0"):
        mark.synchronize()
    with pytest.raises(Misuse, match="also waits for NCCL"):
        machine.synchronize()


def test_a_rank_selects_its_device_before_the_engine_can_use_one(machine, monkeypatch):
    from bench.worker import rank

    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "5")
    monkeypatch.setattr(rank.engines, "make", lambda name, cuda: machine.kernel(0.001))
    rank.start(LaunchSpec("horovod-mpi", cuda=True))
    assert machine.current == 5


def test_only_one_module_of_the_worker_calls_cuda():
    for path in WORKER.glob("*.py"):
        calls = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr in ("cuda", "cudnn")
            and ast.unparse(node.value) != "self"
            and ast.unparse(node.value).startswith("torch")
        ]
        assert not calls or path.name == "accelerator.py", f"{path.name}:{calls}"
