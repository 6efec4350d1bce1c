"""Times collectives: one process per GPU, the cases of a launch one after the other; rank 0 prints the results.

Each case is checked numerically and repeated until its share of time is used up, at least a few times.
"""

from __future__ import annotations

import time

import torch

from bench.worker import rank
from bench.worker.engines import Engine
from bench.worker.protocol import CaseDone, CaseSpec, LaunchSpec, Spec, emit

FEWEST, MOST = 5, 200
WARMUP = 2


def tensor_for(case: CaseSpec, engine: Engine, cuda: bool) -> torch.Tensor:
    """What a rank puts in. Sizes are nccl-tests' way: of the larger of what goes in and what comes out."""
    count = case.count // engine.size if case.collective == "all_gather" else case.count
    place = torch.device("cuda", engine.local_rank) if cuda else torch.device("cpu")
    return torch.full((count,), float(engine.rank + 1), device=place)


def errors(case: CaseSpec, result: torch.Tensor, engine: Engine) -> int:
    """Elements that are not what arithmetic says."""
    ranks = range(1, engine.size + 1)
    total = float(sum(ranks))
    if case.collective == "broadcast":
        wanted = torch.ones(case.count)
    elif case.collective in ("all_gather", "all_to_all"):
        share = case.count // engine.size
        wanted = torch.cat([torch.full((share,), float(one)) for one in ranks])
    else:
        wanted = torch.full((result.numel(),), total)
    return int((result[: wanted.numel()].cpu() != wanted).sum())


def run_case(case: CaseSpec, engine: Engine, cuda: bool) -> CaseDone:
    call = getattr(engine, {"broadcast": "broadcast_tensor"}.get(case.collective, case.collective))
    wrong, times = 0, []
    begin = time.perf_counter()
    for i in range(MOST + WARMUP):
        tensor = tensor_for(case, engine, cuda)
        engine.barrier()
        start = time.perf_counter()
        result = call(case.id, tensor)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if i == 0:
            wrong = sum(engine.gather(errors(case, result, engine)))
        if i >= WARMUP:
            # A collective is over when the last rank has it.
            times.append(max(engine.gather(seconds)))
        late = time.perf_counter() - begin > case.seconds
        if engine.broadcast(late and len(times) >= FEWEST):
            break
    return CaseDone(case.id, times, wrong)


def run_cases(engine: Engine, spec: Spec, launch: LaunchSpec) -> None:
    for case in launch.cases:
        found = run_case(case, engine, launch.cuda)
        if engine.rank == 0:
            emit(found)


def main() -> None:
    rank.serve(run_cases)
