"""Time and size of a report of 10,000 trials: `python tests/perf/report_scale.py [TRIALS]`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path

from bench.cli import main
from bench.results.trial import Breakdown, Emulation, Interval, Point, Trial

SHAPES = {
    # name: (models, engines, batches, nodes)
    "many curves": (["resnet50", "resnet101", "vgg16"], ["horovod-mpi", "ps"], [32, 64, 96], list(range(1, 200))),
    "long curves": (["resnet50"], ["horovod-mpi"], [32, 64, 96], list(range(1, 1200))),
    "one point each": ([f"model{number}" for number in range(10_000)], ["horovod-mpi"], [64], [4]),
}


def around(value: float) -> Interval:
    return Interval(median=value, low=value * 0.99, high=value * 1.01)


def write_trials(path: Path, shape: str, count: int) -> None:
    models, engines, batches, nodes = SHAPES[shape]
    fabrics = {"1g": 1.0, "10g": 10.0, "ib": 56.0}
    with path.open("w") as file:
        for model, engine, batch, n, (fabric, rate) in islice(
            product(models, engines, batches, nodes, fabrics.items()), count
        ):
            compute, comm = batch * 4.56, 1472 * (n - 1) / n / rate
            step = compute + comm
            point = Point(
                fabric=fabric,
                rate_gbps=rate,
                nodes=n,
                gpus_per_node=1,
                batch=batch,
                model=model,
                engine=engine,
                device="emulated:p100",
            )
            trial = Trial(
                id=point.id,
                point=point,
                status="ok",
                kind="emulated",
                started="2026-01-01T00:00:00+00:00",
                steps=20,
                step_ms=around(step),
                images_per_second=around(1000 * n * batch / step),
                breakdown_ms=Breakdown(compute=compute, exposed_comm=comm, data_wait=0, straggler_wait=0),
                bus_bandwidth_gbps=around(0.9 * rate),
                link_gbps=0.95 * rate,
                emulation=Emulation(profile="p100", profile_source="constructed", compute_ms=compute, scale=10),
            )
            file.write(trial.model_dump_json() + "\n")


def measure(shape: str, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trials.jsonl"
        write_trials(path, shape, count)
        trials = path.read_text().count("\n")
        begin = time.perf_counter()
        if main(["report", folder]) != 0:
            raise SystemExit("the report failed")
        seconds = time.perf_counter() - begin
        size = (Path(folder) / "report.html").stat().st_size / 1e6
    return {"trials": trials, "seconds": round(seconds, 2), "html_mb": round(size, 2)}


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(json.dumps({shape: measure(shape, count) for shape in SHAPES}, indent=1))
