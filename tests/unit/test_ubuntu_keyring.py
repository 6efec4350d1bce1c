"""The keys of Ubuntu's archive come from its own package, or a deploy says in one line why not."""

from __future__ import annotations

import hashlib
import io
import subprocess
from pathlib import Path

import pytest

from cluster import ubuntu_keyring
from cluster.core.errors import InfraError
from cluster.core.progress import Progress


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Ubuntu's package as the archive serves it, with other keys."""
    folder = tmp_path / "package"
    keys = folder / ubuntu_keyring.PLACE
    keys.parent.mkdir(parents=True)
    keys.write_bytes(b"the keys")
    (folder / "DEBIAN").mkdir()
    control = "Package: ubuntu-keyring\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: keys\n"
    (folder / "DEBIAN/control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", folder, tmp_path / "keys.deb"], check=True, capture_output=True)
    content = (tmp_path / "keys.deb").read_bytes()
    monkeypatch.setattr(ubuntu_keyring, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(ubuntu_keyring, "INSTALLED", Path(f"{tmp_path}/missing") / ubuntu_keyring.NAME)
    monkeypatch.setattr(ubuntu_keyring, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(ubuntu_keyring.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(content))
    return content


def test_keys_are_taken_out_of_the_package_once(package, monkeypatch):
    found = ubuntu_keyring.find(Progress())
    assert found.read_bytes() == b"the keys"
    monkeypatch.setattr(ubuntu_keyring, "fetch", lambda: pytest.fail("fetched again"))
    assert ubuntu_keyring.find(Progress()) == found


def test_installed_keys_are_used(package, monkeypatch, tmp_path):
    monkeypatch.setattr(ubuntu_keyring, "INSTALLED", tmp_path / "keys.deb")
    assert ubuntu_keyring.find(Progress()) == tmp_path / "keys.deb"
    assert not ubuntu_keyring.CACHE.exists()


def test_package_with_another_checksum_is_refused_and_not_kept(package, monkeypatch):
    monkeypatch.setattr(ubuntu_keyring, "SHA256", "0" * 64)
    with pytest.raises(InfraError, match="is not the file that cluster/ubuntu_keyring"):
        ubuntu_keyring.find(Progress())
    assert list(ubuntu_keyring.CACHE.iterdir()) == []


def test_archive_that_does_not_answer_is_named_in_one_line(package, monkeypatch):
    def silent(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(ubuntu_keyring.urllib.request, "urlopen", silent)
    with pytest.raises(
        InfraError, match=r"^os_release: \S+ is missing, and http://\S+ cannot be fetched: no route[^\n]*$"
    ):
        ubuntu_keyring.find(Progress())
