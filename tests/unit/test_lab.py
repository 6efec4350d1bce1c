"""Token and certificate of the cluster's JupyterLab, and the output of `cluster lab`."""

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from cluster import cli, lab, terraform, wheelhouse
from cluster.core import config, contract, state
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.core.sections import JupyterLab
from cluster.core.state import State

FILES = ("lab_token", "lab.crt", "lab.key")


def make_contract(address: str = "10.9.0.10", jump_host: str | None = None) -> contract.Contract:
    head = {
        "index": 0,
        "role": "head",
        "management_address": address,
        "fabric_addresses": {"1g": "10.9.1.10"},
        "gpus": 0,
        "gpu_model": "none",
    }
    fabric = {"interface": "fabric0", "subnet": "10.9.1.0/24", "rate_gbps": 1, "transport": "tcp", "shaped": True}
    return contract.parse(
        {
            "name": "try",
            "provider": "local",
            "ssh": {"user": "ops", "key": "/k", "known_hosts": "/h", "jump_host": jump_host},
            "nodes": {"head": head},
            "fabrics": {"1g": fabric},
            "active_fabric": "1g",
            "storage": {"backend": "none", "server": "head", "path": "/shared"},
        }
    )


@pytest.fixture
def lab_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr(state, "ROOT", tmp_path)
    found = State("local")
    found.dir.mkdir(parents=True)
    return found


def cluster(**given: str) -> config.Cluster:
    return config.load("local").model_copy(update={"jupyterlab": JupyterLab(**given)})


def read_files(lab_state: State) -> list[str]:
    return [(lab_state.dir / name).read_text() for name in FILES]


def test_token_and_key_are_created_once_and_only_their_owner_can_read_them(lab_state):
    lab.prepare(lab_state, cluster(), make_contract())
    first = read_files(lab_state)
    assert len(first[0]) >= 40
    assert [(lab_state.dir / name).stat().st_mode & 0o777 for name in FILES] == [0o600] * 3
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(lab_state.lab_certificate, lab_state.lab_key)
    lab.prepare(lab_state, cluster(), make_contract())
    assert read_files(lab_state) == first


def test_certificate_is_for_the_heads_address_and_follows_it(lab_state):
    lab.prepare(lab_state, cluster(), make_contract())
    old = lab_state.lab_certificate.read_text()
    assert lab.is_valid_for(lab_state.lab_certificate, "10.9.0.10")
    assert not lab.is_valid_for(lab_state.lab_certificate, "10.9.0.11")
    token = lab_state.lab_token.read_text()
    lab.prepare(lab_state, cluster(), make_contract("head.example.org"))
    assert lab.is_valid_for(lab_state.lab_certificate, "head.example.org")
    assert lab_state.lab_certificate.read_text() != old
    assert lab_state.lab_token.read_text() == token


def test_nothing_is_created_without_the_feature(lab_state):
    features = config.load("local").features.model_copy(update={"jupyterlab": False})
    lab.prepare(lab_state, cluster().model_copy(update={"features": features}), make_contract())
    assert list(lab_state.dir.iterdir()) == []


@pytest.fixture
def given(lab_state, tmp_path) -> config.Cluster:
    """A cluster with a certificate of its own in tmp_path."""
    lab.prepare(lab_state, cluster(), make_contract("lab.example.org"))
    for name in ("lab.crt", "lab.key"):
        shutil.copy(lab_state.dir / name, tmp_path / name)
    return cluster(certificate=str(tmp_path / "lab.crt"), key=str(tmp_path / "lab.key"))


def test_given_certificate_is_used(lab_state, given, tmp_path):
    lab.prepare(lab_state, given, make_contract())
    assert read_files(lab_state)[1:] == [(tmp_path / name).read_text() for name in ("lab.crt", "lab.key")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "lab.key").chmod(0o644), "jupyterlab.key: .*can be read by others; run `chmod 600"),
        (lambda folder: (folder / "lab.key").unlink(), "jupyterlab.key: .*No such file"),
        (lambda folder: (folder / "lab.crt").write_text("x"), "jupyterlab.certificate: .*cannot be used"),
    ],
)
def test_certificate_that_cannot_be_used_is_named(lab_state, given, tmp_path, damage, message):
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        lab.prepare(lab_state, given, make_contract())


def test_command_prints_the_token_only_with_the_option(lab_state, monkeypatch, capsys):
    monkeypatch.setattr(lab, "read_output", lambda _: make_contract(jump_host="me@gate"))
    lab.prepare(lab_state, cluster(), make_contract())
    token = lab_state.lab_token.read_text()
    assert cli.main(["lab"]) == 0
    shown = capsys.readouterr().out
    assert token not in shown
    assert "https://10.9.0.10:8888/lab" in shown and str(lab_state.lab_token) in shown and "ssh -L" in shown
    openssl = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", lab_state.lab_certificate]
    assert subprocess.run(openssl, capture_output=True, text=True, check=True).stdout.partition("=")[2].strip() in shown
    assert cli.main(["lab", "--show-token", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token"] == token


def test_cluster_without_a_lab_names_the_field_that_adds_one(capsys):
    assert cli.main(["--env", "aws", "lab"]) == 2
    assert "features.jupyterlab: true" in capsys.readouterr().err


def test_lab_that_is_not_deployed_names_the_command(lab_state, monkeypatch, capsys):
    assert terraform.read_output is lab.read_output
    monkeypatch.setattr(lab, "read_output", lambda _: make_contract())
    assert cli.main(["lab"]) == 2
    assert "make deploy" in capsys.readouterr().err


def test_each_lock_has_its_own_wheelhouse_that_is_filled_once(tmp_path, monkeypatch):
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path)
    filled = []
    monkeypatch.setattr(wheelhouse, "run_logged", lambda argv, *_: filled.append(argv))
    found = wheelhouse.fill(["jupyterlab"], "bookworm", tmp_path / "log", Progress())
    assert list(found) == ["jupyterlab"]
    assert (
        found["jupyterlab"] == wheelhouse.folder("jupyterlab", "bookworm") != wheelhouse.folder("horovod", "bookworm")
    )
    assert wheelhouse.fill(["jupyterlab"], "bookworm", tmp_path / "log", Progress()) == found
    assert len(filled) == 1
