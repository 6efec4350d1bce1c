"""cluster.yml: what is accepted, and the one line for what is not."""

from pathlib import Path

import pytest
import yaml

from cluster import image, roles
from cluster.core import config
from cluster.core.errors import UserError

GOOD = yaml.safe_load(config.cluster_file("local").read_text())["cluster"]


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a cluster.yml made of GOOD and changes, and load it."""
    monkeypatch.setattr(config, "ROOT", tmp_path)
    path = tmp_path / "inventories/try/group_vars/all/cluster.yml"
    path.parent.mkdir(parents=True)

    def load(nodes: int | None = None, **changes: object) -> config.Cluster:
        values = {**GOOD, **changes}
        path.write_text(yaml.safe_dump({"cluster": {k: v for k, v in values.items() if v is not None}}))
        return config.load("try", nodes)

    return load


def test_shipped_file_is_valid(env):
    assert env().nodes == GOOD["nodes"]


def test_count_given_on_the_command_line_wins(env):
    assert env(nodes=7).nodes == 7


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"nodes": 0}, "cluster.nodes"),
        ({"nodes": 300}, "cluster.nodes"),
        ({"nodes": "four"}, "cluster.nodes"),
        ({"provider": "azure"}, "cluster.provider"),
        ({"colour": "red"}, "cluster.colour"),
        ({"name": "Not Good"}, "cluster.name"),
        ({"active_fabric": "40g"}, "active_fabric"),
        ({"fabrics": {}}, "cluster.fabrics"),
        ({"fabrics": {"1g": {"rate_gbps": -1}}}, "cluster.fabrics.1g.rate_gbps"),
        ({"admin_cidrs": ["0.0.0.0/0"]}, "admin_cidrs"),
        ({"admin_cidrs": []}, "cluster.admin_cidrs"),
        ({"networks": {"management": "10.1.0.0/24", "fabric": "10.1.0.128/25"}}, "networks.fabric"),
        ({"networks": {"management": "10.1.0.0/24", "fabric": "ten"}}, "cluster.networks.fabric"),
        ({"networks": None}, "cluster.networks"),
        ({"storage": {"backend": "afs"}}, "cluster.storage.backend"),
        ({"storage": {"backend": "nfs"}}, "storage.backend: provider local cannot have nfs; write glusterfs or none"),
        ({"storage": {"path": "shared"}}, "cluster.storage.path"),
        ({"storage": {"path": "/"}}, "cluster.storage.path"),
        ({"storage": {"path": "/etc/shared"}}, "cluster.storage.path"),
        ({"storage": {"path": "/home"}}, "cluster.storage.path"),
        ({"storage": {"path": "/sh ared"}}, "cluster.storage.path"),
        ({"storage": {"quota": 3}}, "cluster.storage.quota"),
        ({"jupyterlab": {"certificate": "lab.crt"}}, "cluster.jupyterlab"),
    ],
)
def test_wrong_field_is_named_in_one_line(env, changes, field):
    with pytest.raises(UserError) as caught:
        env(**changes)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_share_is_there_when_it_has_a_backend(env):
    assert "shared_storage" in roles.active(env())
    assert "shared_storage" not in roles.active(env(storage={"backend": "none"}))
    assert "shared_storage" not in roles.active(env(storage=None))


def test_image_depends_on_the_backend(env):
    assert image.node_key(env()) != image.node_key(env(storage={"backend": "none"}))


@pytest.mark.parametrize(
    ("name", "backend"),
    [("local", "glusterfs"), ("aws", "nfs"), ("baremetal", "nfs"), ("virtualwall", "nfs"), ("gpulab", "none")],
)
def test_shipped_backends(name, backend):
    assert config.load(name).storage.backend == backend


def test_unknown_environment_lists_the_known_ones():
    with pytest.raises(UserError, match="local"):
        config.load("nowhere")


def test_file_that_is_not_yaml(env, tmp_path):
    env()
    (tmp_path / "inventories/try/group_vars/all/cluster.yml").write_text("cluster: [")
    with pytest.raises(UserError, match="not YAML"):
        config.load("try")
