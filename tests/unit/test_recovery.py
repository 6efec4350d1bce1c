"""Live nodes are adopted or the command stops: what a deploy does without Terraform's state or without the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from standins import podman

from cluster import lifecycle, recovery, terraform
from cluster.core import config, state, tfstate
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers import neighbours
from cluster.providers.local import machine, node, provider
from cluster.providers.local.provider import Local

NETWORKS = {"management": "10.99.0.0/24", "fabric": "10.99.1.0/24"}
REQUIRED: dict[str, Any] = {
    **{"name": "try", "provider": "local", "nodes": 4, "networks": NETWORKS, "admin_cidrs": ["10.99.0.1/32"]},
    **{"fabrics": {"1g": {"rate_gbps": 1}}, "active_fabric": "1g"},
}
TRUNCATED = '{"version": 4, "resources": [{"mode": "mana'
EMPTY = json.dumps({"version": 4, "serial": 1, "lineage": "x", "outputs": {}, "resources": []})


class Environment:
    """ENV=try with two live nodes, as a deploy leaves it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.machine = root, folder
        self.write()
        self.state = State("try")
        self.state.prepare()
        for name in ("head", "w1"):
            self.boot(name)
        self.state.tfstate.write_text(self.recorded("head", "w1"))

    def write(self, **changes: Any) -> None:
        path = self.root / "inventories/try/group_vars/all/cluster.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"cluster": {**REQUIRED, **changes}}))

    def boot(self, name: str) -> None:
        local = Local(self.state, config.load("try"))
        seed = self.state.dir / "seeds" / name
        seed.mkdir(parents=True)
        for file in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub", node.CREATED):
            (seed / file).write_text("key of a host")
        labels = {
            machine.CLUSTER: "try",
            machine.OWNER: machine.owner_of(self.state.dir),
            machine.FINGERPRINT: f"try-{name} {node.fingerprint(local._spec(name))}",
        }
        podman.add_container(self.machine, f"try-{name}", labels, seed)

    def recorded(self, *names: str) -> str:
        instances = [{"index_key": name, "attributes": {}} for name in names]
        output = {"nodes": {name: {} for name in names}, "ssh": {"key": str(self.state.key)}}
        content = {"outputs": {"cluster": {"value": output}}, "resources": [{"name": "node", "instances": instances}]}
        return json.dumps({"version": 4, "serial": 1, **content})

    def examine(self, nodes: int | None = None, replace: bool = False) -> recovery.Found:
        return recovery.examine(self.state, config.load("try", nodes), nodes, replace)

    def lost(self, nodes: int | None = None) -> str:
        """The line with which a deploy stops; nothing has changed."""
        before = podman.read(self.machine), sorted(self.state.dir.rglob("*"))
        with pytest.raises(UserError) as stopped:
            self.examine(nodes)
        assert (podman.read(self.machine), sorted(self.state.dir.rglob("*"))) == before
        assert "REPLACE=1" in str(stopped.value)
        return str(stopped.value)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    for name, value in podman.install(tmp_path / "machine").items():
        monkeypatch.setenv(name, value)
    for module in (config, state, provider.claims, neighbours):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    # The count of a deployment that can be read comes from Terraform itself.
    monkeypatch.setattr(recovery, "read_output", lambda _: pytest.fail("asked Terraform"))
    return Environment(tmp_path, tmp_path / "machine")


@pytest.mark.parametrize("content", [None, "", EMPTY, TRUNCATED, "[]", "\0\0", '{"version": 4, "resources": {}}'])
def test_live_nodes_are_adopted_without_terraforms_state(live: Environment, content: str | None) -> None:
    live.state.tfstate.unlink()
    if content is not None:
        live.state.tfstate.write_text(content)
    before = podman.read(live.machine)
    found = live.examine()
    assert found.adopted == ["head", "w1"]
    # Two nodes live, though cluster.yml has four.
    assert found.cluster.nodes == 2
    assert found.replaced == []
    found.carry_out(Progress("try"))
    # Terraform finds no state, and the node tool keeps what is there.
    assert not live.state.tfstate.exists()
    assert podman.read(live.machine) == before


def test_more_nodes_can_be_requested_than_are_adopted(live: Environment) -> None:
    live.state.tfstate.unlink()
    found = live.examine(nodes=3)
    assert (found.adopted, found.cluster.nodes) == (["head", "w1"], 3)


def test_fewer_nodes_without_terraforms_state_stop_the_command(live: Environment) -> None:
    live.state.tfstate.write_text("")
    line = live.lost(nodes=1)
    assert "ENV=try: w1 and all data on them would be lost: terraform.tfstate is empty, and cluster.nodes is 1" in line
    found = live.examine(nodes=1, replace=True)
    assert (found.adopted, found.replaced) == (["head"], ["w1"])
    found.carry_out(Progress("try"))
    assert list(podman.read(live.machine)["containers"]) == ["try-head"]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"networks": {**NETWORKS, "fabric": "10.99.2.0/24"}},
        {"storage": {"backend": "glusterfs"}},
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_change_that_replaces_live_nodes_stops_the_command(
    live: Environment, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], known: bool
) -> None:
    monkeypatch.setattr(recovery, "count", lambda *_: 2)
    live.write(**changes)
    if not known:
        live.state.tfstate.unlink()
    assert "head, w1 and all data on them would be lost" in live.lost()
    assert live.examine(replace=True).replaced == ["head", "w1"]


def test_nodes_that_terraform_knows_stay_as_they_are(live: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "count", lambda *_: 2)
    found = live.examine()
    assert (found.adopted, found.replaced, found.damaged, found.new_key) == ([], [], "", False)


@pytest.mark.parametrize("damage", ["missing", "garbage", "another"])
def test_lost_key_is_not_made_anew(live: Environment, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(recovery, "count", lambda *_: 2)
    live.state.key.unlink()
    if damage == "garbage":
        live.state.key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    if damage == "another":
        public = live.state.key.with_suffix(".pub")
        before = public.read_text()
        state.make_key(live.state.key, "another")
        public.write_text(before)
    line = live.lost()
    assert "head, w1 and all data" in line
    assert "id_ed25519" in line
    found = live.examine(replace=True)
    assert found.new_key
    assert found.addresses() == ['terraform_data.node["head"]', 'terraform_data.node["w1"]']
    found.carry_out(Progress("try"))
    assert not live.state.key.exists()


def test_no_command_makes_a_lost_key_anew(live: Environment) -> None:
    live.state.key.unlink()
    with pytest.raises(UserError, match="id_ed25519 is missing and the nodes accept no other key"):
        live.state.prepare()
    assert not live.state.key.exists()
    live.state.prepare(new_key=True)
    assert live.state.key.exists()


def test_lost_public_key_is_derived_from_the_private_one(live: Environment) -> None:
    public = live.state.key.with_suffix(".pub")
    before = public.read_text().split()[:2]
    public.unlink()
    live.state.prepare()
    assert public.read_text().split()[:2] == before


def test_state_folder_that_is_gone_stops_the_command(live: Environment) -> None:
    live.state.remove()
    line = live.lost()
    assert "head, w1 and all data on them would be lost" in line


def test_nodes_of_another_state_folder_are_not_adopted(live: Environment) -> None:
    content = podman.read(live.machine)
    for row in content["containers"].values():
        row["labels"][machine.OWNER] = "/elsewhere/.state/try"
    podman.write(live.machine, content)
    live.state.tfstate.unlink()
    found = live.examine(nodes=2)
    assert (found.adopted, found.replaced) == ([], [])


def test_node_whose_creation_was_interrupted_holds_no_data(live: Environment) -> None:
    (live.state.dir / "seeds/w1" / node.CREATED).unlink()
    live.state.tfstate.unlink()
    assert live.examine(nodes=2).adopted == ["head"]


@pytest.mark.parametrize("content", [TRUNCATED, "[]", "\0\0"])
def test_damaged_state_gives_one_line(live: Environment, content: str) -> None:
    live.state.tfstate.write_text(content)
    with pytest.raises(UserError, match=r"^ENV=try: terraform.tfstate is damaged: .*`make deploy ENV=try` finds"):
        terraform.read_output(live.state)
    assert tfstate.damage(live.state.tfstate)


@pytest.mark.parametrize("content", ["", EMPTY, '{"version": 4, "outputs": {"cluster": {"value": null}}}'])
def test_state_without_a_deployment_gives_one_line(live: Environment, content: str) -> None:
    live.state.tfstate.write_text(content)
    with pytest.raises(InfraError, match=r"^ENV=try: no finished deployment; run `make deploy ENV=try`$"):
        terraform.read_output(live.state)


def test_addresses_are_those_of_terraforms_module() -> None:
    text = (Path(__file__).parents[2] / "terraform/modules/nodes/main.tf").read_text()
    assert f"first = {provider.FIRST_ADDRESS}\n" in text


def test_deploy_names_who_took_a_subnet_while_the_image_was_built(
    live: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.state.tfstate.unlink()
    found = live.examine()

    def taken(*_: object) -> None:
        podman.add_network(live.machine, "other-fabric", NETWORKS["fabric"])
        raise InfraError("podman network failed: Error: subnet is already used on the host or by another config")

    monkeypatch.setattr(lifecycle.Root, "apply", taken)
    with pytest.raises(UserError, match=r"cluster.networks.fabric: 10.99.1.0/24 is in use by .*other.* free subnets:"):
        lifecycle.apply(found, Progress("try"))
