"""Time the collectives of a launch, one process per GPU. Rank 0 prints the results.

Each case is checked numerically once and repeated until its time is used up.
"""

import time

import torch

from bench.worker import rank
from bench.worker.accelerator import Accelerator
from bench.worker.engines import Engine
from bench.worker.protocol import CaseDone, CaseSpec, LaunchSpec, Spec, emit

MIN_REPEATS, MAX_REPEATS = 5, 200
WARMUP_REPEATS = 2


def tensor_for(case: CaseSpec, engine: Engine, place: str) -> torch.Tensor:
    """The input of a rank. As in nccl-tests, the size of a case is the larger of its input and output."""
    count = case.count // engine.size if case.collective == "all_gather" else case.count
    return torch.full((count,), float(engine.rank + 1), device=place)


def errors(case: CaseSpec, result: torch.Tensor, engine: Engine) -> int:
    """The number of elements that differ from the expected result."""
    ranks = range(1, engine.size + 1)
    if case.collective == "broadcast":
        expected = torch.ones(case.count)
    elif case.collective in ("all_gather", "all_to_all"):
        share = case.count // engine.size
        expected = torch.cat([torch.full((share,), float(value)) for value in ranks])
    else:
        expected = torch.full((result.numel(),), float(sum(ranks)))
    return int((result[: expected.numel()].cpu() != expected).sum())


def run_case(case: CaseSpec, engine: Engine, device: Accelerator) -> CaseDone:
    call = getattr(engine, {"broadcast": "broadcast_tensor"}.get(case.collective, case.collective))
    wrong, times = 0, []
    begin = time.perf_counter()
    for i in range(MAX_REPEATS + WARMUP_REPEATS):
        tensor = tensor_for(case, engine, device.place)
        engine.barrier()
        start = time.perf_counter()
        result = call(case.id, tensor)
        device.wait(device.mark())
        seconds = time.perf_counter() - start
        if i == 0:
            wrong = sum(engine.gather(errors(case, result, engine)))
        if i >= WARMUP_REPEATS:
            # A collective ends when the slowest rank ends.
            times.append(max(engine.gather(seconds)))
        late = time.perf_counter() - begin > case.seconds
        if engine.broadcast(late and len(times) >= MIN_REPEATS):
            break
    return CaseDone(case.id, times, wrong)


def run_cases(engine: Engine, device: Accelerator, spec: Spec, launch: LaunchSpec) -> None:
    for case in launch.cases:
        done = run_case(case, engine, device)
        if engine.rank == 0:
            emit(done)


def main() -> None:
    rank.serve(run_cases)
