"""Times collectives: one process per GPU, the cases of --spec one after the other, JSON lines from rank 0.

Each case is checked numerically and repeated until its share of time is used up, at least a few times.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.worker.main import emit, serve

FEWEST, MOST = 5, 200
WARMUP = 2


def tensor_for(case: dict[str, Any], engine: Any) -> torch.Tensor:
    """What a rank puts in. Sizes are nccl-tests' way: of the larger of what goes in and what comes out."""
    count = case["count"] // engine.size if case["collective"] == "all_gather" else case["count"]
    place = torch.device("cuda", engine.local_rank) if case["cuda"] else torch.device("cpu")
    return torch.full((count,), float(engine.rank + 1), device=place)


def errors(case: dict[str, Any], result: torch.Tensor, engine: Any) -> int:
    """Elements that are not what arithmetic says."""
    ranks = range(1, engine.size + 1)
    total = float(sum(ranks))
    if case["collective"] == "broadcast":
        wanted = torch.ones(case["count"])
    elif case["collective"] in ("all_gather", "all_to_all"):
        share = case["count"] // engine.size
        wanted = torch.cat([torch.full((share,), float(rank)) for rank in ranks])
    else:
        wanted = torch.full((result.numel(),), total)
    return int((result[: wanted.numel()].cpu() != wanted).sum())


def run_case(case: dict[str, Any], engine: Any) -> dict[str, Any]:
    call = getattr(engine, {"broadcast": "broadcast_tensor"}.get(case["collective"], case["collective"]))
    wrong, times = 0, []
    begin = time.perf_counter()
    for i in range(MOST + WARMUP):
        tensor = tensor_for(case, engine)
        engine.barrier()
        start = time.perf_counter()
        result = call(f"{case['id']}", tensor)
        if case["cuda"]:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if i == 0:
            wrong = sum(engine.gather(errors(case, result, engine)))
        if i >= WARMUP:
            # A collective is over when the last rank has it.
            times.append(max(engine.gather(seconds)))
        late = time.perf_counter() - begin > case["seconds"]
        if engine.broadcast(late and len(times) >= FEWEST):
            break
    return {"id": case["id"], "times": times, "errors": wrong}


def run_cases(engine: Any, spec: dict[str, Any]) -> None:
    for case in spec["cases"]:
        found = run_case({**case, "cuda": spec["cuda"]}, engine)
        if engine.rank == 0:
            emit("case", **found)


if __name__ == "__main__":
    serve(run_cases)
