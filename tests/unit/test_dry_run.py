"""A dry run before the first deploy plans for the cluster of cluster.yml, not for an imaginary one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench import cli
from cluster.core import config, paths, state

CLUSTER = {
    **{"name": "dry", "provider": "local", "nodes": 2, "admin_cidrs": ["10.99.0.1/32"], "active_fabric": "slow"},
    "networks": {"management": "10.99.0.0/24", "fabric": "10.99.1.0/24"},
    "fabrics": {"slow": {"rate_gbps": 2.5, "transport": "verbs"}},
}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `bench sweep --dry-run` with a plan for the environment dry."""
    for module in (config, state):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "require_checkout", lambda *_: None)
    place = tmp_path / "inventories/dry/group_vars/all"
    place.mkdir(parents=True)
    (place / "cluster.yml").write_text(yaml.safe_dump({"cluster": CLUSTER}))

    def run(**fields: object) -> int:
        content = {"nodes": [1, 2], "batches": [32], "fabrics": ["slow"], **fields}
        (tmp_path / "plan.yml").write_text(json.dumps(content))
        return cli.main(["sweep", "--env", "dry", "--plan", str(tmp_path / "plan.yml"), "--dry-run", "--json"])

    return run


def test_rate_and_transport_are_those_of_the_file(plan, capsys) -> None:
    assert plan() == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert {(one["rate_gbps"], one["transport"]) for one in trials} == {(2.5, "verbs")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fabrics": ["1g"]}, "plan.fabrics: unknown fabric '1g'; choose from slow"),
        ({"nodes": [99]}, "at most 64; list fewer"),
        ({"container": "x"}, "plan.container: a container cannot set the rate of a shaped fabric"),
        ({"seconds": 1e9}, "plan.seconds"),
        ({"seconds": 0}, "plan.seconds"),
        ({"compute_ms": 1e-300}, "plan.compute_ms"),
        ({"links": {"x": {"rate_gbps": 1e-9}}}, "plan.links.x.rate_gbps"),
        ({"engines": ["hogwild"], "gpus_per_node": 2}, "plan.engines: hogwild shares the memory of one node, not of 2"),
        ({"engines": ["pipeline"], "compressions": ["1bit"]}, "engine pipeline does not support 1bit"),
        ({"engines": ["pipeline"], "models": ["alexnet"], "stages": 99}, "plan.stages: 99 stages, but alexnet has 8"),
    ],
)
def test_what_the_cluster_cannot_run_is_refused(plan, fields, message, capsys) -> None:
    assert plan(**fields) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
