"""Token and certificate of the cluster's JupyterLab, and what `cluster lab` tells of them."""

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from cluster import cli, lab, terraform, wheelhouse
from cluster.core import config, contract, state
from cluster.core.errors import UserError
from cluster.core.sections import JupyterLab
from cluster.core.state import State

FILES = ("lab_token", "lab.crt", "lab.key")


def made(address: str = "10.9.0.10", jump_host: str | None = None) -> contract.Contract:
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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr(state, "ROOT", tmp_path)
    found = State("local")
    found.dir.mkdir(parents=True)
    return found


def cluster(**given: str) -> config.Cluster:
    return config.load("local").model_copy(update={"jupyterlab": JupyterLab(**given)})


def content(place: State) -> list[str]:
    return [(place.dir / name).read_text() for name in FILES]


def test_token_and_key_are_made_once_and_only_for_their_owner(place):
    lab.prepare(place, cluster(), made())
    first = content(place)
    assert len(first[0]) >= 40
    assert [(place.dir / name).stat().st_mode & 0o777 for name in FILES] == [0o600] * 3
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(place.lab_certificate, place.lab_key)
    lab.prepare(place, cluster(), made())
    assert content(place) == first


def test_certificate_is_for_the_heads_address_and_follows_it(place):
    lab.prepare(place, cluster(), made())
    old = place.lab_certificate.read_text()
    assert lab.stands_for(place.lab_certificate, "10.9.0.10")
    assert not lab.stands_for(place.lab_certificate, "10.9.0.11")
    token = place.lab_token.read_text()
    lab.prepare(place, cluster(), made("head.example.org"))
    assert lab.stands_for(place.lab_certificate, "head.example.org")
    assert place.lab_certificate.read_text() != old
    assert place.lab_token.read_text() == token


def test_nothing_is_made_without_the_feature(place):
    features = config.load("local").features.model_copy(update={"jupyterlab": False})
    lab.prepare(place, cluster().model_copy(update={"features": features}), made())
    assert list(place.dir.iterdir()) == []


def test_given_certificate_is_used(place, tmp_path):
    lab.prepare(place, cluster(), made("lab.example.org"))
    for name in ("lab.crt", "lab.key"):
        shutil.copy(place.dir / name, tmp_path / name)
    lab.prepare(place, cluster(certificate=str(tmp_path / "lab.crt"), key=str(tmp_path / "lab.key")), made())
    assert content(place)[1:] == [(tmp_path / name).read_text() for name in ("lab.crt", "lab.key")]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "lab.key").chmod(0o644), "jupyterlab.key: .*can be read by others; run `chmod 600"),
        (lambda folder: (folder / "lab.key").unlink(), "jupyterlab.key: .*No such file"),
        (lambda folder: (folder / "lab.crt").write_text("x"), "jupyterlab.certificate: .*cannot be used"),
    ],
)
def test_certificate_that_cannot_be_used_is_named(place, tmp_path, spoil, said):
    lab.prepare(place, cluster(), made())
    for name in ("lab.crt", "lab.key"):
        shutil.copy(place.dir / name, tmp_path / name)
    spoil(tmp_path)
    with pytest.raises(UserError, match=said):
        lab.prepare(place, cluster(certificate=str(tmp_path / "lab.crt"), key=str(tmp_path / "lab.key")), made())


def test_command_shows_the_token_only_when_asked(place, monkeypatch, capsys):
    monkeypatch.setattr(lab, "read_output", lambda _: made(jump_host="me@gate"))
    lab.prepare(place, cluster(), made())
    token = place.lab_token.read_text()
    assert cli.main(["lab"]) == 0
    shown = capsys.readouterr().out
    assert token not in shown
    assert "https://10.9.0.10:8888/lab" in shown and str(place.lab_token) in shown and "ssh -L" in shown
    openssl = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", place.lab_certificate]
    assert subprocess.run(openssl, capture_output=True, text=True, check=True).stdout.partition("=")[2].strip() in shown
    assert cli.main(["lab", "--show-token", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token"] == token


def test_cluster_without_a_lab_says_how_to_get_one(capsys):
    assert cli.main(["--env", "aws", "lab"]) == 2
    assert "features.jupyterlab: true" in capsys.readouterr().err


def test_nothing_deployed_is_said(place, monkeypatch, capsys):
    assert terraform.read_output is lab.read_output
    monkeypatch.setattr(lab, "read_output", lambda _: made())
    assert cli.main(["lab"]) == 2
    assert "make deploy" in capsys.readouterr().err


def test_each_lock_has_its_own_wheelhouse_which_is_filled_once(tmp_path, monkeypatch):
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path)
    asked = []
    monkeypatch.setattr(wheelhouse, "run_logged", lambda argv, *_: asked.append(argv))
    found = wheelhouse.fill(["jupyterlab"], tmp_path / "log")
    assert list(found) == ["jupyterlab"]
    assert found["jupyterlab"] == wheelhouse.folder("jupyterlab") != wheelhouse.folder("horovod")
    assert [argv[-1].name for argv in asked] == ["jupyter.lock"]
    assert wheelhouse.fill(["jupyterlab"], tmp_path / "log") == found
    assert len(asked) == 1
