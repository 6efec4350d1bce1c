"""Wheelhouses: folders of Python packages that the controller downloads once, so that nodes need no package index.

A site without internet can use them too: copy the cache folder there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import uv

from cluster.core import locks
from cluster.core.config import PYTHONS, ROOT, versions
from cluster.core.errors import InfraError, UserError
from cluster.core.process import run_logged
from cluster.core.progress import Progress
from cluster.core.state import CACHE

# wheelhouse -> its lock file; see lock
LOCKS = {
    "horovod": ROOT / "requirements/nodes.lock",
    "horovod-cuda": ROOT / "requirements/nodes-cuda.lock",
    "horovod-cuda12": ROOT / "requirements/nodes-cuda12.lock",
    "nccl": ROOT / "requirements/nccl.lock",
    "nccl-cuda12": ROOT / "requirements/nccl-cuda12.lock",
    "jupyterlab": ROOT / "requirements/jupyter.lock",
}
COMPLETE = ".complete"
# Oldest first: every release has at least the glibc of Ubuntu 22.04, 2.35.
PLATFORMS = (
    "linux",
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{minor}" for minor in range(5, 36)),
)


def lock(name: str, release: str) -> Path:
    return for_python(LOCKS[name], PYTHONS[release])


def for_python(common: Path, python: str) -> Path:
    """The lock for a Python: one that the common lock does not hold for has its own."""
    own = common.with_name("{}-py{}{}.lock".format(common.stem, *python.split(".")))
    return own if own.exists() else common


def folder(name: str, release: str) -> Path:
    digest = hashlib.sha256(lock(name, release).read_bytes() + PYTHONS[release].encode())
    if name.startswith("horovod"):
        digest.update(versions()["horovod"].encode())
    return CACHE / "wheelhouse" / digest.hexdigest()[:12]


def packages(name: str, release: str) -> list[locks.Locked]:
    """The packages of this lock that the nodes' Python installs."""
    python, file = PYTHONS[release], lock(name, release)
    found = locks.installed_by(python, file)
    torch = next((one.version for one in found if one.requirement.name == "torch"), "")
    if name == "horovod" and not torch.endswith("+cpu"):
        index = versions()["torch_cpu_index"]
        raise UserError(
            f"cluster.os_release: {release} has Python {python}, for which {file.relative_to(ROOT)} has no checksum of "
            f"torch's CPU build; choose another release, or run make lock where {index} can be reached"
        )
    return found


def check(names: Iterable[str], release: str) -> None:
    """Refuse a release that a lock does not hold for, before anything is created."""
    for name in names:
        packages(name, release)


def for_nodes(release: str) -> list[str]:
    """pip's options to download for the nodes' Python instead of the one that runs pip."""
    python = PYTHONS[release]
    abis = ("cp{}{}".format(*python.split(".")), "abi3", "none")
    return [
        *("--python-version", python, "--implementation", "cp", *(f"--abi={abi}" for abi in abis)),
        *(f"--platform={platform}_x86_64" for platform in PLATFORMS),
    ]


def fill(names: Iterable[str], release: str, log: Path, progress: Progress) -> dict[str, Path]:
    """Download the packages of these locks, and Horovod's source, into the cache, side by side; name -> folder."""
    wanted = {name: folder(name, release) for name in names}
    missing = [name for name, path in wanted.items() if not (path / COMPLETE).exists()]
    if not missing:
        return wanted
    folders = [wanted[name] for name in missing]
    text = "fetching Python packages"
    with (
        progress.part("wheels", text, "Python packages for the nodes fetched"),
        progress.polled("wheels", lambda: f"{size(folders) / 1e6:.0f} MB of Python packages fetched"),
        ThreadPoolExecutor(len(missing)) as pool,
    ):
        for done in [pool.submit(fill_one, name, release, log.with_stem(f"wheels-{name}")) for name in missing]:
            done.result()
    return wanted


def size(folders: list[Path]) -> int:
    total = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        with suppress(OSError):  # pip renames files
            total += path.stat().st_size
    return total


def fill_one(name: str, release: str, log: Path) -> None:
    target = folder(name, release)
    needed = packages(name, release)
    # pip downloads into a temporary folder first. Here size counts it.
    temporary = target / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    env = os.environ | {"TMPDIR": str(temporary)}
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", target]
    wanted = target / "requirements.txt"
    wanted.write_text("".join(f"{one.line()}\n" for one in needed))
    locked = [
        *pip,
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        *for_nodes(release),
        "--requirement",
        wanted,
    ]
    try:
        run_logged(locked, log, env, "pip download")
    except InfraError:
        if name != "horovod":
            raise
        # Not every pip is configured with an index of CPU builds of PyTorch.
        run_logged([*locked, "--extra-index-url", versions()["torch_cpu_index"]], log, env, "pip download")
    if name.startswith("horovod-cuda"):
        check_cuda(target, versions()["torch_cuda12" if name == "horovod-cuda12" else "torch"])
    if name.startswith("horovod"):
        fill_source(target, [*pip, "--no-deps", "--no-build-isolation", "--no-binary=horovod"], log)
    shutil.rmtree(temporary)
    # The nodes install with it: it needs a tenth of the time of pip and no Python package of its own.
    shutil.copy2(uv.find_uv_bin(), target / "uv")
    (target / COMPLETE).touch()


def fill_source(target: Path, pip: list[str | Path], log: Path) -> None:
    pinned = versions()
    source = target / f"horovod-{pinned['horovod']}.tar.gz"
    run_logged([*pip, f"horovod=={pinned['horovod']}"], log, os.environ, "pip download")
    if hashlib.sha256(source.read_bytes()).hexdigest() != pinned["horovod_sha256"]:
        source.unlink()
        raise InfraError("horovod: the downloaded source does not match versions.yml horovod_sha256")


def check_cuda(target: Path, version: str) -> None:
    """Refuse a CPU build of the same version, which pip may find too."""
    for wheel in target.glob(f"torch-{version}*.whl"):
        with zipfile.ZipFile(wheel) as content:
            if not any(name.endswith("/libtorch_cuda.so") for name in content.namelist()):
                wheel.unlink()
                raise InfraError(f"{wheel.name}: torch without CUDA; give pip access to the public index")
