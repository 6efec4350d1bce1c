"""`cluster put` and `cluster get`: which paths they accept, and the command they run."""

from __future__ import annotations

import pytest
from test_lab import make_contract

from cluster import cli, transfer
from cluster.core.contract import Contract
from cluster.core.errors import UserError


@pytest.fixture
def contract() -> Contract:
    found = make_contract()
    return found.model_copy(update={"storage": found.storage.model_copy(update={"backend": "nfs"})})


@pytest.mark.parametrize("text", ["datasets", "datasets/a b", "/shared/runs/7/out", "results/../datasets", "runs/7/"])
def test_path_in_a_folder_of_the_share_is_accepted(contract: Contract, text: str) -> None:
    assert transfer.on_share(contract, "DST", text).startswith(("/shared/datasets", "/shared/runs/7"))


@pytest.mark.parametrize(
    "text", ["..", "datasets/../..", "/etc/passwd", "", "/shared", "elsewhere/x", "/shared2/datasets"]
)
def test_path_outside_the_folders_of_the_share_is_refused(contract: Contract, text: str) -> None:
    with pytest.raises(UserError, match="not in a folder of the share"):
        transfer.on_share(contract, "DST", text)


def test_files_belong_to_the_training_account_and_the_host_key_is_checked(contract: Contract) -> None:
    words = transfer.rsync(contract, "./a", transfer.address(contract, "/shared/datasets"))
    assert "--rsync-path=sudo -u horovod rsync" in words
    assert any(word.startswith("--rsh=ssh ") and "StrictHostKeyChecking=yes" in word for word in words)
    assert words[-3:] == ["--", "./a", "ops@10.9.0.10:/shared/datasets"]


def test_ipv6_address_of_the_head_is_told_from_the_path(contract: Contract) -> None:
    head = contract.nodes["head"].model_copy(update={"management_address": "fd00::10"})
    found = contract.model_copy(update={"nodes": {**contract.nodes, "head": head}})
    assert transfer.address(found, "/shared/runs") == "ops@[fd00::10]:/shared/runs"


@pytest.mark.parametrize("words", [["put"], ["put", "/no/such/file"], ["get"], ["put", "/etc/hostname"]])
def test_missing_source_or_cluster_ends_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "deployed", refuse)
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def refuse(env: str) -> Contract:
    raise UserError(f"ENV={env}: nothing is deployed")
