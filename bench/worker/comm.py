"""Times collectives: one process per GPU, the cases of --spec one after the other, JSON lines from rank 0.

Each case is checked numerically and repeated until its share of time is used up, at least a few times.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
# With the launcher gone nobody would end us.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)

from bench.worker import engines  # noqa: E402
from bench.worker.main import emit, local_rank, set_rate  # noqa: E402

FEWEST, MOST = 5, 200
WARMUP = 2


def tensor_for(case: dict[str, Any], engine: Any) -> torch.Tensor:
    """What a rank puts in. Sizes are nccl-tests' way: of the larger of what goes in and what comes out."""
    count = case["count"] // engine.size if case["collective"] == "all_gather" else case["count"]
    return torch.full((count,), float(engine.rank + 1))


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
    return int((result[: wanted.numel()] != wanted).sum())


def run_case(case: dict[str, Any], engine: Any) -> dict[str, Any]:
    call = getattr(engine, {"broadcast": "broadcast_tensor"}.get(case["collective"], case["collective"]))
    wrong, times = 0, []
    begin = time.perf_counter()
    for i in range(MOST + WARMUP):
        tensor = tensor_for(case, engine)
        engine.barrier()
        start = time.perf_counter()
        result = call(f"{case['id']}", tensor)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--run", required=True, help="marks the processes of one launch")
    args = parser.parse_args()
    spec = json.loads(base64.b64decode(args.spec))
    set_rate(spec, local_rank())
    torch.set_num_threads(1)
    engine = engines.make(args.engine)
    if engine.rank == 0:
        emit("started", size=engine.size)
    for case in spec["cases"]:
        found = run_case(case, engine)
        if engine.rank == 0:
            emit("case", **found)
    engine.barrier()
    if engine.rank == 0:
        emit("finished")
    engine.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
