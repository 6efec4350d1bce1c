"""A wrong field in the sections virtualwall and gpulab of cluster.yml gives one line that names it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster.core import config
from cluster.core.config import Cluster
from cluster.core.errors import one_line


def error_message(env: str, **changes: Any) -> str:
    content = yaml.safe_load(config.cluster_file(env).read_text())["cluster"]
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        target = content[section] if section else content
        target.pop(field) if value is None else target.update({field: value})
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate(content)
    return one_line(caught.value, "cluster")


@pytest.mark.parametrize("env", ["virtualwall", "gpulab"])
def test_examples_are_valid(env: str) -> None:
    assert config.load(env).provider == env


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"virtualwall": None}, "virtualwall: missing"),
        ({"virtualwall__pem": None}, "cluster.virtualwall: pem: missing; backend jfed needs it"),
        ({"virtualwall__backend": "slices"}, "cluster.virtualwall: site: missing; backend slices needs it"),
        ({"virtualwall__backend": "omni"}, "cluster.virtualwall.backend"),
        ({"virtualwall__lans": {"1g": "192.168.1.0/24"}}, "virtualwall.lans: give each of the fabrics 1g, 10g"),
        ({"virtualwall__lans": {"1g": "192.168.1.0/24", "10g": "192.168.0.0/16"}}, "overlaps"),
        ({"virtualwall__lans": {"1g": "192.168.1.0/29", "10g": "192.168.2.0/24"}}, "too small for 10 nodes"),
        ({"virtualwall__component_manager": "wall2"}, "cluster.virtualwall.component_manager"),
        ({"virtualwall__colour": "red"}, "cluster.virtualwall.colour: unknown field"),
    ],
)
def test_wrong_virtualwall_field_is_named(changes: dict[str, Any], message: str) -> None:
    assert message in error_message("virtualwall", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpulab": None}, "gpulab: missing"),
        ({"gpulab__mode": "2x5"}, "cluster.gpulab.mode"),
        ({"gpulab__project": ""}, "cluster.gpulab.project"),
        ({"gpulab__storage": "relative"}, "cluster.gpulab.storage"),
        ({"gpulab__minutes": 0}, "cluster.gpulab.minutes"),
    ],
)
def test_wrong_gpulab_field_is_named(changes: dict[str, Any], message: str) -> None:
    assert message in error_message("gpulab", **changes)
