"""A plan fits the cluster: which one a cluster gets, what its words mean there, and what is refused before a deploy."""

import copy
import json

import pytest
import yaml
from test_inventory import OUTPUT

from bench import cli
from bench.plan import check, fit, schema, unfold
from bench.results import store
from bench.sweep import executors, runner, spec
from bench.worker.protocol import Spec
from cluster import lifecycle
from cluster.core import config, contract, ssh
from cluster.core.errors import UserError


def cluster(*gpus: int, provider: str = "baremetal", shaped: bool = False) -> contract.Contract:
    """A contract with these GPUs per node, the head first."""
    values = copy.deepcopy(OUTPUT)
    values["provider"] = provider
    node = next(iter(values["nodes"].values()))
    values["nodes"] = {
        f"n{index}": {**node, "index": index, "role": "worker" if index else "head", "gpus": count}
        for index, count in enumerate(gpus)
    }
    for fabric in values["fabrics"].values():
        fabric["shaped"] = shaped
    return contract.parse(values)


@pytest.mark.parametrize(
    ("gpus", "nodes", "per_node", "device"),
    [
        ((0, 0, 0, 0, 0), [1, 2, 4, 5], [1], "emulated:p100"),
        ((4, 4), [1, 2], [4], "cuda"),
        ((0, 8, 8, 4), [1, 2, 3], [4], "cuda"),
        ((1,), [1], [1], "cuda"),
    ],
)
def test_auto_means_all_nodes_that_compute_and_the_gpus_that_each_of_them_has(gpus, nodes, per_node, device):
    plan = fit.load("auto", there := cluster(*gpus))
    assert (plan.nodes, plan.gpus_per_node, plan.device) == (nodes, per_node, device)
    assert plan.fabrics == list(there.fabrics)
    check.check(plan, there, len(there.compute))


def test_all_means_every_fabric_of_the_cluster(tmp_path):
    (tmp_path / "plan.yml").write_text(yaml.safe_dump({"nodes": [1], "batches": [32], "fabrics": "all"}))
    assert fit.load(str(tmp_path / "plan.yml"), there := cluster(1, 1)).fabrics == list(there.fabrics)


def test_any_other_word_is_refused_in_one_line(tmp_path):
    (tmp_path / "plan.yml").write_text(yaml.safe_dump({"nodes": "many", "batches": [32], "fabrics": "all"}))
    with pytest.raises(UserError, match=r"plan\.nodes: .*list"):
        fit.load(str(tmp_path / "plan.yml"), cluster(1, 1))


@pytest.mark.parametrize(
    ("env", "name"), [("local", "quick"), ("aws", "auto"), ("baremetal", "auto"), ("gpulab", "gpulab")]
)
def test_environment_without_a_plan_gets_the_one_that_fits_it(env, name):
    planned = config.load(env).planned()
    assert fit.plan_name(planned) == name
    if name == "auto":
        plan = fit.load(name, planned)
        check.check(plan, planned, len(planned.compute))


def test_several_numbers_of_gpus_per_node_are_a_dimension_of_the_plan(tmp_path):
    values = {"nodes": [2], "batches": [32], "fabrics": "active", "gpus_per_node": [1, 4], "device": "auto"}
    (tmp_path / "plan.yml").write_text(yaml.safe_dump(values))
    groups = list(unfold.points(fit.load(str(tmp_path / "plan.yml"), there := cluster(4, 4)), there))
    assert [group.points[0].gpus_per_node for group in groups] == [1, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 4}, "plan.device: cuda needs 4 GPUs per node, the cluster has 2"),
        ({"engines": ["ps"]}, "plan.engines: ps does not run on GPUs"),
        ({"compressions": ["1bit"]}, "plan.compressions: 1bit does not run on GPUs"),
        ({"precision": "bf16"}, "plan.precision: unknown precision 'bf16'; choose from fp32, tf32, amp"),
        ({"device": "cpu", "precision": "amp"}, "plan.precision: device cpu always computes in fp32"),
        ({"device": "cpu", "channels_last": True}, "plan.channels_last: needs device cuda, not cpu"),
        ({"device": "emulated:p100", "channels_last": True}, "plan.channels_last: needs device cuda"),
        ({"device": "emulated:p100", "precision": "int8"}, "precision: 'int8' was not published for p100"),
    ],
)
def test_plan_that_would_crash_on_gpus_is_refused(tmp_path, changes, message):
    values = {"nodes": [1], "batches": [32], "fabrics": "active", "device": "cuda", **changes}
    (tmp_path / "plan.yml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=message):
        check.check(fit.load(str(tmp_path / "plan.yml"), there := cluster(2, 2)), there, 2)


@pytest.mark.parametrize(
    "gpu", ["t4", "v100", "Tesla P40", "1080ti", "RTX 2080 Ti", "a10g", "h100-sxm", "l40s", "none"]
)
def test_tf32_is_refused_where_the_name_of_the_gpu_says_that_it_has_none(tmp_path, gpu):
    values = {"nodes": [1], "batches": [32], "fabrics": "active", "device": "cuda", "precision": "tf32"}
    (tmp_path / "plan.yml").write_text(yaml.safe_dump(values))
    there = cluster(0, 1)
    there.nodes["n1"].gpu_model = gpu
    plan = fit.load(str(tmp_path / "plan.yml"), there)
    if gpu in ("a10g", "h100-sxm", "l40s", "none"):
        check.check(plan, there, 1)
    else:
        with pytest.raises(UserError, match=f"plan.precision: tf32 needs GPUs from Ampere on, n1 has {gpu}"):
            check.check(plan, there, 1)


@pytest.mark.parametrize("plan", ["quick", "virtualwall"])
def test_plan_that_cannot_fit_costs_nothing(monkeypatch, capsys, plan):
    monkeypatch.setattr(lifecycle, "deploy", lambda *_: pytest.fail("nodes were created"))
    assert cli.main(["sweep", "--env", "aws", "--plan", plan]) == 2
    error = capsys.readouterr().err
    assert "unknown fabric '1g'" in error and error.count("\n") == 1


@pytest.mark.parametrize("env", ["local", "aws", "baremetal"])
def test_dry_run_lists_the_trials_of_an_environment_that_is_not_deployed(capsys, env):
    assert cli.main(["sweep", "--env", env, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] and {row["fabric"] for row in found["trials"]} <= set(config.load(env).fabrics)


def test_shipped_plans_without_auto_are_complete():
    for name in schema.names():
        if name != "auto":
            schema.load(name)


def test_head_without_gpus_launches_and_runs_no_rank(monkeypatch, tmp_path):
    reached: dict[str, list[str]] = {}
    monkeypatch.setattr(ssh, "run_on_all", lambda _, names, *__, **___: reached.update(install=list(names)) or {})
    there = cluster(0, 4, 4)
    executor = executors.SshExecutor(there)
    sweep = runner.Sweep(fit.load("auto", there), store.RunFolder(tmp_path), executor, {}, None, check=False)
    group = next(group for group in sweep.groups if group.nodes == 2)
    launch = sweep.launch(group, executor.install(sweep.names, Spec([], {})), spec.Scaling())
    assert reached["install"] == ["n0", "n1", "n2"] and launch.hosts == ("n1", "n2")
    words = " ".join(executor.argv(launch))
    assert f"@{there.nodes['n0'].management_address} " in words
    assert "supervise" in words and "n0,n1,n2" in words and "-H n1:4,n2:4" in words
