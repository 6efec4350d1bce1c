"""Metrics that a sweep saves, and targets that Prometheus on the head scrapes."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.results import store
from bench.sweep import monitoring
from cluster.core import contract
from cluster.core.config import ROOT


def node(index: int, role: str, gpus: int = 0) -> dict:
    return {
        "index": index,
        "role": role,
        "management_address": f"10.9.0.{10 + index}",
        "fabric_addresses": {"1g": f"10.9.1.{10 + index}"},
        "gpus": gpus,
        "gpu_model": "none",
    }


CONTRACT = contract.parse(
    {
        "name": "try",
        "provider": "local",
        "ssh": {"user": "ops", "key": "/k", "known_hosts": "/h", "jump_host": None},
        "nodes": {"head": node(0, "head"), "w1": node(1, "worker")},
        "fabrics": {
            "1g": {"interface": "fab7", "subnet": "10.9.1.0/24", "rate_gbps": 1, "transport": "tcp", "shaped": True}
        },
        "active_fabric": "1g",
        "storage": {"backend": "none", "server": "head", "path": "/shared"},
    }
)
# The format of Prometheus: a matrix with values as text.
ANSWERS = {
    "cpu_busy_share": [
        {"metric": {"node": "head"}, "values": [[100.0, "0.5"], [105.0, "0.75"]]},
        {"metric": {"node": "w1"}, "values": [[100.0, "NaN"], [105.0, "0.25"]]},
    ],
    "gpu_busy_share": [{"metric": {"node": "w1", "gpu": "0", "Hostname": "x"}, "values": [[105.0, "0.9"]]}],
    "rdma_sent_bytes_per_second": [],
}


@pytest.fixture
def run(tmp_path: Path) -> store.RunFolder:
    return store.RunFolder(tmp_path)


def answering(monkeypatch: pytest.MonkeyPatch, reply: object) -> list[dict]:
    """Stand-in for the head: record each request, and reply."""
    requests = []

    def fake(argv: list[str], input: str, **_: object) -> subprocess.CompletedProcess:
        requests.append({"argv": argv, **json.loads(input)})
        if isinstance(reply, Exception):
            raise reply
        return subprocess.CompletedProcess(argv, 0, json.dumps(reply), "")

    monkeypatch.setattr(subprocess, "run", fake)
    return requests


def test_series_of_the_run_are_saved_by_node(run, monkeypatch):
    requests = answering(monkeypatch, {"start": 100.0, "end": 160.0, "step": 5, "answers": ANSWERS})
    monitoring.save(CONTRACT, run, 1000.0, 1060.0)
    kept = json.loads((run.folder / "monitoring.json").read_text())
    assert kept["schema_version"] == 1
    assert kept["spans"] == [
        {
            "start": 100.0,
            "end": 160.0,
            "step_seconds": 5,
            "series": {
                "cpu_busy_share": {"head": [[100.0, 0.5], [105.0, 0.75]], "w1": [[105.0, 0.25]]},
                "gpu_busy_share": {"w1/0": [[105.0, 0.9]]},
            },
        }
    ]
    assert requests[0]["seconds"] == 60
    assert f"ops@{CONTRACT.nodes['head'].management_address}" in requests[0]["argv"]
    assert 'device="fab7"' in requests[0]["queries"]["fabric_sent_bytes_per_second"]


def test_second_sweep_of_a_run_adds_a_span(run, monkeypatch):
    answering(monkeypatch, {"start": 100.0, "end": 160.0, "step": 5, "answers": ANSWERS})
    monitoring.save(CONTRACT, run, 0.0, 60.0)
    monitoring.save(CONTRACT, run, 100.0, 160.0)
    assert len(json.loads((run.folder / "monitoring.json").read_text())["spans"]) == 2


def test_long_runs_are_saved_with_a_limited_number_of_points():
    assert monitoring.request(CONTRACT, 60, 0)["step"] == 5
    day = monitoring.request(CONTRACT, 86400, 0)
    assert 86400 / day["step"] <= monitoring.MAX_POINTS


@pytest.mark.parametrize(
    "reply",
    [
        subprocess.CalledProcessError(1, "ssh", stderr="urllib.error.URLError: Connection refused\n"),
        subprocess.TimeoutExpired("ssh", 60),
        OSError("no ssh"),
    ],
)
def test_offline_head_prints_one_line_and_does_not_fail_the_run(run, monkeypatch, capsys, reply):
    answering(monkeypatch, reply)
    monitoring.save(CONTRACT, run, 0.0, 60.0)
    printed = capsys.readouterr().out
    assert printed.startswith("monitoring: no metrics saved: ")
    assert len(printed.strip().splitlines()) == 1
    assert not (run.folder / "monitoring.json").exists()


def scraped(cluster: list[str], gpu: list[str]) -> dict:
    """job -> node -> targets of Prometheus, in a cluster of these nodes."""
    folder = ROOT / "roles/monitoring"
    values = yaml.safe_load((folder / "defaults/main.yml").read_text())
    template = Environment(
        loader=FileSystemLoader(folder / "templates"), undefined=StrictUndefined, trim_blocks=True, autoescape=True
    ).get_template("prometheus.yml.j2")
    text = template.render(
        **values,
        groups={"cluster": cluster, "gpu": gpu},
        hostvars={name: {"node_fabric_addresses": {"1g": f"10.9.1.{i}"}} for i, name in enumerate(cluster)},
        contract_active_fabric="1g",
    )
    jobs = yaml.safe_load(text)["scrape_configs"]
    return {job["job_name"]: {row["labels"]["node"]: row["targets"] for row in job["static_configs"]} for job in jobs}


def test_removed_node_is_no_longer_scraped():
    three = scraped(["head", "w1", "w2"], [])
    assert three == {"node": {"head": ["10.9.1.0:9100"], "w1": ["10.9.1.1:9100"], "w2": ["10.9.1.2:9100"]}}
    assert set(scraped(["head", "w1"], [])["node"]) == {"head", "w1"}


def test_only_nodes_with_gpus_are_scraped_for_gpu_metrics():
    assert scraped(["head", "w1"], ["w1"])["gpu"] == {"w1": ["10.9.1.1:9400"]}
