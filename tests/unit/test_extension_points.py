"""What CONTRIBUTING.md promises: a provider, role, engine or model that is only half added fails here, and the message
names the file that is missing."""

from __future__ import annotations

import ast
import csv
from pathlib import Path
from typing import get_args

import pytest
import yaml

from bench.catalogue import models
from bench.plan.schema import Engine
from bench.results.dimensions import ENGINE_NAMES, MODEL_NAMES
from bench.sweep.launch import LAUNCHERS
from cluster.core import config
from cluster.core.config import ROOT, Cluster
from cluster.providers.registry import PROVIDERS

KNOWN_PROVIDERS = sorted(
    {path.parent.name for path in ROOT.glob("cluster/providers/*/provider.py")}
    | {path.parent.name for path in ROOT.glob("terraform/*/main.tf")}
)
ROLES = sorted(path.parent.parent.name for path in ROOT.glob("roles/*/tasks/main.yml"))
ENGINES = sorted(set(get_args(Engine)) - {"horovod"} | LAUNCHERS.keys())


def constants(path: Path, name: str) -> set[str]:
    """The strings inside one function or assignment of a file that cannot be imported here: it needs torch."""
    for node in ast.parse(path.read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if getattr(node, "name", None) == name or any(getattr(target, "id", None) == name for target in targets):
            return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    raise AssertionError(f"{path.relative_to(ROOT)}: no {name}")


def absent(*paths: str) -> list[str]:
    return [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", KNOWN_PROVIDERS)
def test_a_provider_has_its_class_its_terraform_root_an_environment_and_a_page(name: str) -> None:
    assert name in PROVIDERS, f"cluster/providers/registry.py: PROVIDERS lacks {name}"
    assert name in get_args(Cluster.model_fields["provider"].annotation), f"cluster/core/config.py: provider {name}"
    root = [f"terraform/{name}/{part}.tf" for part in ("main", "outputs", "variables", "versions")]
    inventory = [f"inventories/{name}/group_vars/all/cluster.yml", f"inventories/{name}/terraform.py"]
    page = [] if name == "local" else [f"docs/{name}.md"]
    assert not absent(f"cluster/providers/{name}/provider.py", *root, *inventory, *page)
    assert list((ROOT / f"terraform/{name}/tests").glob("*.tftest.hcl")), f"terraform/{name}/tests: no *.tftest.hcl"
    assert (ROOT / inventory[1]).is_symlink(), f"{inventory[1]}: not a link to inventories/terraform.py"
    assert config.load(name).provider == name


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_two_halves_an_order_and_a_scenario_with_tests(role: str) -> None:
    ordered = {
        entry["role"]: entry for entry in yaml.safe_load((ROOT / "ansible/roles.yml").read_text())["cluster_roles"]
    }
    assert role in ordered, f"ansible/roles.yml lacks {role}"
    halves = [f"roles/{role}/tasks/{half}.yml" for half in ("main", "install", "configure")]
    halves += [f"roles/{role}/tasks/remove.yml"] if "feature" in ordered[role] else []
    scenario = f"roles/{role}/molecule/default"
    assert not absent(*halves, f"roles/{role}/meta/argument_specs.yml", f"{scenario}/molecule.yml")
    assert list((ROOT / scenario / "tests").glob("test_*.py")), f"{scenario}/tests: no test"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_a_launcher_a_worker_and_a_name_on_plots(engine: str) -> None:
    assert engine in get_args(Engine), f"bench/plan/schema.py: Engine lacks {engine}"
    assert engine in LAUNCHERS, f"bench/sweep/launch.py: LAUNCHERS lacks {engine}"
    assert engine in ENGINE_NAMES, f"bench/results/points.py: ENGINE_NAMES lacks {engine}"
    # What the worker does not know it would take for Horovod.
    known = constants(ROOT / "bench/worker/engines.py", "make")
    assert engine.startswith("horovod") or engine in known, f"bench/worker/engines.py: make lacks {engine}"


@pytest.mark.parametrize("model", models.NAMES)
def test_a_model_has_layers_published_figures_a_network_and_a_name_on_plots(model: str) -> None:
    with (ROOT / "bench/catalogue/published/models.csv").open() as file:
        assert model in {row["model"] for row in csv.DictReader(file)}, "bench/catalogue/published/models.csv"
    assert model in constants(ROOT / "bench/worker/torch_models.py", "MODELS"), "bench/worker/torch_models.py: MODELS"
    assert model in MODEL_NAMES, "bench/results/points.py: MODEL_NAMES"
