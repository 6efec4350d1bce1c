"""Save the nodes' metrics during a sweep, from Prometheus on the head, to results/<env>/<run>/monitoring.json.

The file has one span per sweep that measured something (a second sweep may complete a run):

    {"schema_version": 1,
     "spans": [{"start": 1700000000.0, "end": 1700000060.0, "step_seconds": 5,        the head's clock
                "series": {"cpu_busy_share": {"head": [[1700000000.0, 0.41], ...], "w1": ...}, ...}}]}

SERIES lists the series. A series without data (no GPU, no InfiniBand) is left out. GPUs are named head/0.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import time
from typing import Any

from bench.results import store
from bench.sweep.progress import console
from cluster.core import files, ssh
from cluster.core.contract import Contract
from cluster.core.errors import InfraError

SCHEMA_VERSION = 1
MIN_STEP = 5  # monitoring_interval_seconds in roles/monitoring
MAX_POINTS = 2000
WINDOW = "20s"
TIMEOUT = 60
SERIES = {
    "cpu_busy_share": 'sum by (node) (rate(node_cpu_seconds_total{mode!~"idle|iowait"}[W])) '
    "/ sum by (node) (rate(node_cpu_seconds_total[W]))",
    "memory_used_bytes": "node_memory_MemTotal_bytes - node_memory_MemAvailable_bytes",
    "fabric_sent_bytes_per_second": 'sum by (node) (rate(node_network_transmit_bytes_total{device="FABRIC"}[W]))',
    "fabric_received_bytes_per_second": 'sum by (node) (rate(node_network_receive_bytes_total{device="FABRIC"}[W]))',
    "other_sent_bytes_per_second": 'sum by (node) (rate(node_network_transmit_bytes_total{device!="FABRIC"}[W]))',
    "other_received_bytes_per_second": 'sum by (node) (rate(node_network_receive_bytes_total{device!="FABRIC"}[W]))',
    # The counters of a network device do not include RDMA.
    "rdma_sent_bytes_per_second": "sum by (node) (rate(node_infiniband_port_data_transmitted_bytes_total[W]))",
    "rdma_received_bytes_per_second": "sum by (node) (rate(node_infiniband_port_data_received_bytes_total[W]))",
    "disk_read_bytes_per_second": "sum by (node) (rate(node_disk_read_bytes_total[W]))",
    "disk_written_bytes_per_second": "sum by (node) (rate(node_disk_written_bytes_total[W]))",
    "gpu_busy_share": "DCGM_FI_DEV_GPU_UTIL / 100",
    "gpu_memory_used_bytes": "DCGM_FI_DEV_FB_USED * 1048576",
    "gpu_power_watts": "DCGM_FI_DEV_POWER_USAGE",
}
# Runs on the head: only the head reaches Prometheus, and all times are of its clock.
QUERY_SCRIPT = """
import json, sys, time, urllib.parse, urllib.request
job = json.load(sys.stdin)
end = time.time() - job["ago"]
span = {"start": end - job["seconds"], "end": end, "step": job["step"]}
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
answers = {}
for name, text in job["queries"].items():
    url = "http://127.0.0.1:9090/api/v1/query_range?" + urllib.parse.urlencode({**span, "query": text})
    answers[name] = json.load(open_url(url, timeout=20))["data"]["result"]
print(json.dumps({**span, "answers": answers}))
"""


def save(contract: Contract, run: store.RunFolder, begin: float, end: float) -> None:
    """Add the metrics between two times (of time.monotonic) to the run; print a warning if there are none."""
    try:
        answer = query(contract, request(contract, end - begin, time.monotonic() - end))
    except (InfraError, OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:] or ["no answer"]
        console.print(f"monitoring: no metrics saved: {reason[0]}; the trials are complete")
        return
    span = {"start": answer["start"], "end": answer["end"], "step_seconds": answer["step"]}
    add(run, {**span, "series": series(answer["answers"])})


def request(contract: Contract, seconds: float, ago: float) -> dict[str, Any]:
    fabric = contract.fabrics[contract.active_fabric].interface
    queries = {name: text.replace("[W]", f"[{WINDOW}]").replace("FABRIC", fabric) for name, text in SERIES.items()}
    step = max(MIN_STEP, math.ceil(seconds / MAX_POINTS))
    return {"seconds": seconds, "ago": ago, "step": step, "queries": queries}


def query(contract: Contract, job: dict[str, Any]) -> dict[str, Any]:
    argv = ssh.argv(contract, contract.head, shlex.join(["python3", "-c", QUERY_SCRIPT]))
    done = subprocess.run(argv, input=json.dumps(job), capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return files.answer(done.stdout, "Prometheus", dict[str, Any])


def series(answers: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[list[float]]]]:
    """The answers of Prometheus as name -> node -> [time, value], without values that are not finite."""
    result: dict[str, dict[str, list[list[float]]]] = {}
    for name, rows in answers.items():
        for row in rows:
            labels = row["metric"]
            place = f"{labels['node']}/{labels['gpu']}" if "gpu" in labels else labels["node"]
            values = [[moment, value] for moment, text in row["values"] if math.isfinite(value := float(text))]
            if values:
                result.setdefault(name, {})[place] = values
    return result


def add(run: store.RunFolder, span: dict[str, Any]) -> None:
    path = run.folder / "monitoring.json"
    try:
        spans = files.mapping(path)["spans"] if path.exists() else []
        content = {"schema_version": SCHEMA_VERSION, "spans": [*spans, span]}
        path.write_text(json.dumps(content))
    except OSError as error:
        raise store.write_error(path, error) from None
