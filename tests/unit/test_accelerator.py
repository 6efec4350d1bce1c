"""What a rank does with its GPU, on a fake of torch.cuda: its own device only, and times that keep compute and
communication apart."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from fake_cuda import DEVICES, Machine, Misuse

from bench.sweep import record
from bench.worker import accelerator, step_statistics
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


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "5"}, 5),
        ({"HOROVOD_LOCAL_RANK": "5"}, 5),
        # mpirun starts one torchrun per node, whose ranks inherit what MPI calls that one process.
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "LOCAL_RANK": "5"}, 5),
        ({}, 0),
    ],
)
def test_every_launcher_tells_a_rank_which_device_is_its_own(machine, monkeypatch, given, number):
    from bench.worker import rank

    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert rank.local_rank() == number


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("amp bf16", False)])
def test_only_precision_tf32_computes_in_tf32(machine, precision, tf32):
    accelerator.make(True, 5).arithmetic(precision)
    backends = sys.modules["torch"].backends
    assert (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32) == (tf32, tf32)


@pytest.mark.parametrize(
    ("precision", "autocast", "scaled"),
    [
        ("fp32", None, False),
        ("tf32", None, False),
        ("amp bf16", ("cuda", "bfloat16"), False),
        ("amp fp16", ("cuda", "float16"), True),
    ],
)
def test_amp_casts_the_forward_pass_and_only_fp16_scales_the_loss(machine, precision, autocast, scaled):
    arithmetic = accelerator.make(True, 5).arithmetic(precision)
    assert (arithmetic.run(), arithmetic.scaler) == (autocast, ("cuda", scaled))


@pytest.mark.parametrize(("ampere", "found"), [([True, True], "amp bf16"), ([True, False], "amp fp16")])
def test_amp_is_bf16_only_if_the_gpus_of_all_ranks_have_it(ampere, found):
    assert accelerator.computed_in("amp", ampere) == found


def test_tf32_on_a_gpu_without_it_is_refused(machine):
    machine.capability = (7, 5)
    assert not accelerator.make(True, 5).ampere
    with pytest.raises(RuntimeError, match=r"plan\.precision: tf32 needs GPUs from Ampere on"):
        accelerator.computed_in("tf32", [True, False])


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_fails_the_trial_in_one_line(loss):
    found = step_statistics.first_not_finite([6.9, 6.8, loss, 6.7])
    ranks = [RankReport("head", 0, [], {}), RankReport("w1", 1, [], {}, not_finite=found)]
    assert record.divergence(ranks) == (
        "the loss is NaN or infinite from step 3 on (w1/1); use precision fp32, or check the data"
    )
    assert step_statistics.first_not_finite([6.9, 6.8]) is None and record.divergence(ranks[:1]) is None


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
