"""The keys of Ubuntu's archive, without which mmdebstrap makes no Ubuntu root. Debian 12 has no package of them."""

from __future__ import annotations

import hashlib
import subprocess
import urllib.request
from pathlib import Path

from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.core.state import CACHE

NAME = "ubuntu-archive-keyring.gpg"
INSTALLED = Path("/usr/share/keyrings") / NAME
PLACE = f".{INSTALLED}"
# The checksum says that it is Ubuntu's, not the connection.
PACKAGE = "http://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
TIMEOUT = 30


def find(progress: Progress) -> Path:
    """The installed keyring, or that of Ubuntu's package, which is kept in the cache."""
    if INSTALLED.exists():
        return INSTALLED
    kept = CACHE / NAME
    if not kept.exists():
        progress.now("root", f"fetching {PACKAGE}")
        CACHE.mkdir(parents=True, exist_ok=True)
        keys = extract(fetch())
        partial = kept.with_suffix(".part")
        partial.write_bytes(keys)
        partial.replace(kept)
    return kept


def fetch() -> bytes:
    try:
        with urllib.request.urlopen(PACKAGE, timeout=TIMEOUT) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise InfraError(f"os_release: {INSTALLED} is missing, and {PACKAGE} cannot be fetched: {error}") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise InfraError(f"os_release: {PACKAGE} is not the file that cluster/ubuntu_keyring.py knows")
    return content


def extract(package: bytes) -> bytes:
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", "/dev/stdin"], input=package, capture_output=True, check=True)
    words = ["tar", "--extract", "--to-stdout", PLACE]
    return subprocess.run(words, input=tar.stdout, capture_output=True, check=True).stdout
