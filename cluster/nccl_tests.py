"""The source of nccl-tests: the controller fetches it once; one node compiles it and the others get copies.

A site without internet can put the file into the cache. Without it a deploy goes on: the validation has its own
all-reduce over NCCL.
"""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path

from cluster.core.config import versions
from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.core.state import CACHE

URL = "https://github.com/NVIDIA/nccl-tests/archive/v{}.tar.gz"
TIMEOUT = 30


def folder() -> Path:
    """It also keeps what a node compiled."""
    return CACHE / "nccl-tests"


def source() -> Path:
    return folder() / f"nccl-tests-{versions()['nccl_tests']}.tar.gz"


def fetch(progress: Progress) -> None:
    target = source()
    folder().mkdir(parents=True, exist_ok=True)
    if not target.exists():
        url = URL.format(versions()["nccl_tests"])
        progress.now("nccl-tests", f"fetching {url}")
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:  # noqa: S310 (https)
                content = answer.read()
        except OSError as error:
            progress(f"nccl-tests is left out: {url}: {error}; to have it, copy the file to {target}")
            return
        finally:
            progress.now("nccl-tests", "")
        check(content, url)
        partial = target.with_suffix(".part")
        partial.write_bytes(content)
        partial.replace(target)
    check(target.read_bytes(), str(target))


def check(content: bytes, where: str) -> None:
    if hashlib.sha256(content).hexdigest() != versions()["nccl_tests_sha256"]:
        raise InfraError(f"{where}: does not match versions.yml nccl_tests_sha256; remove it, or correct the checksum")
