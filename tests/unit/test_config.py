"""cluster.yml: what is accepted, how it is completed, and the one line for what is wrong."""

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster import cli, image, roles
from cluster.core import config, contract, ssh, state
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State, terraform_binary, write_file

GOOD = yaml.safe_load(config.cluster_file("local").read_text())["cluster"]
# Every field without a default.
REQUIRED = {
    "name": "try",
    "provider": "local",
    "nodes": 2,
    "networks": {"management": "10.99.0.0/24", "fabric": "10.99.1.0/24"},
    "admin_cidrs": ["10.99.0.1/32"],
    "fabrics": {"1g": {"rate_gbps": 1}},
    "active_fabric": "1g",
}
SAMPLES = [config.cluster_file(name) for name in ("aws", "baremetal", "gpulab", "local", "virtualwall")]
# Found before a test moves the project's folder.
TERRAFORM = terraform_binary()
SCHEMA = json.loads((config.ROOT / "docs/cluster.schema.json").read_text())


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
        ({"storage": {"path": "/home/horovod"}}, "cluster.storage.path"),
        ({"storage": {"path": "/opt/horovod"}}, "cluster.storage.path"),
        ({"storage": {"path": "/opt/horovod/bin"}}, "cluster.storage.path"),
        ({"storage": {"path": "/sh ared"}}, "cluster.storage.path"),
        ({"storage": {"quota": 3}}, "cluster.storage.quota"),
        ({"jupyterlab": {"certificate": "lab.crt"}}, "cluster.jupyterlab"),
        ({"ports": {"ssh": 8888}}, "ports: jupyter: 8888 is the port of SSH too"),
        ({"networks": {"management": "127.1.0.0/24", "fabric": "10.1.0.0/24"}}, "cluster.networks.management"),
        ({"networks": {"management": "10.1.0.0/24", "fabric": "224.1.0.0/24"}}, "cluster.networks.fabric"),
        ({"networks": {"management": "10.1.0.0/24", "fabric": "169.254.7.0/24"}}, "cluster.networks.fabric"),
        ({"networks": {"management": "fd00::/64", "fabric": "10.1.0.0/24"}}, "fd00::/64 is IPv6, which training does"),
        ({"fabrics": {"1g": {"rate_gbps": 1e-9}}}, "cluster.fabrics.1g.rate_gbps"),
        ({"fabrics": {"1g": {"rate_gbps": float("inf")}}}, "not YAML: inf is not a finite number"),
        ({"fabrics": {"1g": {"rate_gbps": 1, "transport": {"x": []}}}}, "cluster.fabrics.1g.transport"),
        ({"gpus_per_node": 8}, "gpus_per_node: 8, but nodes of provider local have no GPUs"),
        ({"name": "x" * 5000}, "cluster.name"),
        ({"x" * 5000: 1}, "unknown field"),
        ({"gpu_model": ["x" * 5000]}, "cluster.gpu_model"),
    ],
)
def test_wrong_field_is_named_in_one_line(env, changes, field):
    with pytest.raises(UserError) as caught:
        env(**changes)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


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


@pytest.fixture
def minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one environment, `try`, whose cluster.yml has the required fields only."""
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr(state, "ROOT", tmp_path)
    path = tmp_path / "inventories/try/group_vars/all/cluster.yml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({"cluster": REQUIRED}))
    return path


def test_required_fields_are_completed(minimal):
    found = config.load("try").model_dump(mode="json")
    assert found["ports"] == {"ssh": 22, "jupyter": 8888}
    # Local fabrics are shaped: otherwise they would not have their rate, and the deploy would fail.
    assert found["fabrics"] == {"1g": {"rate_gbps": 1, "transport": "tcp", "shaped": True}}
    assert (found["gpus_per_node"], found["gpu_model"], found["storage"]["backend"]) == (0, "none", "none")
    assert not any(found["features"].values())


def test_only_local_fabrics_are_shaped_by_default(env):
    assert not env(fabrics={"1g": {"rate_gbps": 1, "shaped": False}}).fabrics["1g"].shaped
    aws = yaml.safe_load(SAMPLES[0].read_text())["cluster"] | {"fabrics": {"ena": {"rate_gbps": 5}}}
    assert not config.Cluster.model_validate(aws).fabrics["ena"].shaped


def test_completed_file_completes_to_itself(minimal):
    cluster = config.load("try", nodes=3)
    minimal.write_text(cluster.text())
    assert config.load("try") == cluster


def test_config_prints_the_completed_file_and_changes_nothing(minimal, tmp_path, capsys):
    assert cli.main(["--env", "try", "config", "--json", "--nodes", "5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert cli.main(["--env", "try", "config", "--nodes", "5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed
    assert printed["cluster"] == config.load("try", 5).model_dump(mode="json")
    assert not (tmp_path / ".state").exists()


def test_deployed_configuration_wins_until_the_next_deploy(minimal):
    assert State("try").cluster().nodes == 2
    State("try").dir.mkdir(parents=True)
    write_file(State("try").cluster_file, config.load("try", nodes=7).text())
    minimal.write_text(yaml.safe_dump({"cluster": {**REQUIRED, "nodes": 3}}))
    assert State("try").cluster().nodes == 7
    assert config.load("try").nodes == 3
    assert State("try").cluster_file.stat().st_mode & 0o077 == 0


def test_terraform_plans_a_cluster_of_required_fields_only(minimal, tmp_path):
    (tmp_path / "cluster.yml").write_text(config.load("try").text())
    env = {**os.environ, "TF_DATA_DIR": str(tmp_path / "data"), "TF_CLI_CONFIG_FILE": os.devnull}
    given = {"cluster_file": tmp_path / "cluster.yml", "image": "x", "state_dir": tmp_path}
    variables = [word for name, value in given.items() for word in ("-var", f"{name}={value}")]
    root = Path(__file__).resolve().parents[2] / "terraform/local"
    plan = ["plan", "-no-color", f"-state={tmp_path / 'none'}", *variables]
    for words in (["init", "-backend=false"], plan):
        argv = [TERRAFORM, f"-chdir={root}", words[0], "-input=false", *words[1:]]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "Plan: 4 to add" in done.stdout


@pytest.mark.parametrize(
    ("provider", "old", "new"),
    [("local", "rdma", "verbs"), ("aws", "rdma", "efa"), ("aws", "verbs", "efa"), ("local", "tcp", "tcp")],
)
def test_old_transport_is_accepted_with_a_hint(provider, old, new, tmp_path, monkeypatch, capsys):
    values = yaml.safe_load(config.cluster_file(provider).read_text())["cluster"]
    name = values["active_fabric"]
    values["fabrics"][name]["transport"] = old
    monkeypatch.setattr(config, "ROOT", tmp_path)
    (tmp_path / "cluster.yml").write_text(yaml.safe_dump({"cluster": values}))
    assert config.read(tmp_path / "cluster.yml").fabrics[name].transport == new
    hint = f"cluster.yml: cluster.fabrics.{name}.transport: {old} is now {new}; write that\n"
    assert capsys.readouterr().err == ("" if old == new else hint)


@pytest.mark.parametrize(("transport", "named"), [("efa", "only provider aws has efa"), ("pigeon", "'pigeon'")])
def test_transport_that_the_provider_lacks_is_refused(env, transport, named):
    with pytest.raises(UserError, match=named):
        env(fabrics={"1g": {"rate_gbps": 1, "transport": transport}})


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parts[-4])
def test_samples_name_the_schema_and_keep_to_it(path):
    word, _, place = path.read_text().splitlines()[0].partition("$schema=")
    assert word == "# yaml-language-server: "
    assert (path.parent / place).resolve() == config.ROOT / "docs/cluster.schema.json"
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


def test_schema_refuses_what_the_model_refuses():
    jsonschema.validate({"cluster": REQUIRED}, SCHEMA)
    for wrong in ({"nodes": config.MAX_NODES + 1}, {"colour": "red"}, {"fabrics": {"1g": {"transport": "tcp"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"cluster": REQUIRED | wrong}, SCHEMA)


def test_schema_describes_every_field():
    models = {**SCHEMA["$defs"], "ClusterFile": SCHEMA}
    bare = [
        f"{model}.{name}"
        for model, content in models.items()
        for name, field in content["properties"].items()
        if "description" not in field and "#/$defs/" not in json.dumps(field)
    ]
    assert not bare, bare


def shape(value: object) -> object:
    return {name: shape(inner) for name, inner in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize(
    "path", sorted(config.ROOT.glob("terraform/*/tests/*.yml")), ids=lambda p: "/".join(p.parts[-3:])
)
def test_terraform_is_tested_with_completed_files(path):
    base = config.read(path.parent / "cluster.yml").model_dump(mode="json")
    found = yaml.safe_load(path.read_text())["cluster"]
    loose = {"fabrics": {}, "baremetal": None}
    assert shape(found | loose) == shape(base | loose)


def test_jobs_have_no_login_and_say_so() -> None:
    planned = config.load("gpulab").planned()
    assert (planned.executor, planned.ssh) == ("gpulab", None)
    with pytest.raises(UserError, match=r"provider gpulab: .* nobody can log in"):
        ssh.argv(planned, planned.head, "true")


def test_contract_of_an_earlier_version_with_an_empty_login_asks_for_a_deploy() -> None:
    earlier = config.load("gpulab").planned().model_dump()
    earlier["ssh"] = {"user": "", "key": "", "known_hosts": ""}
    with pytest.raises(InfraError, match=r"cluster\.ssh\.user: .*deploy again"):
        contract.parse(earlier)
