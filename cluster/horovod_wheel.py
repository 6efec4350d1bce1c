"""HOROVOD_WHEEL=: a compiled Horovod that `make deploy` installs instead of compiling one. It is checked first.

What only a node can tell, such as whether its CPU has the instructions, the role horovod checks by starting it once.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

from cluster import gpus, survey
from cluster.core import files
from cluster.core.config import PYTHONS, Cluster, versions
from cluster.core.errors import UserError

LIBRARY = re.compile(r"horovod/torch/mpi_lib_v2\..*\.so")
# Of OpenMPI 4, which the nodes have.
MPI = b"libmpi.so.40\0"


def given(cluster: Cluster) -> str:
    """The path in HOROVOD_WHEEL, or "" if it is not set."""
    text = os.environ.get("HOROVOD_WHEEL", "")
    if text:
        old = any(cluster.gpus()) and gpus.expected(survey.models(cluster)) == "12"
        check(Path(text), PYTHONS[cluster.os_release], versions()["torch_cuda12" if old else "torch"])
    return str(Path(text).resolve()) if text else ""


def check(path: Path, python: str, wanted: str) -> None:
    """Refuse a wheel of another Horovod, Python, torch or MPI than the nodes have."""
    pinned = versions()
    tag = "cp{}{}".format(*python.split("."))
    name = f"horovod-{pinned['horovod']}-{tag}-{tag}-linux_x86_64.whl"
    if path.name != name:
        raise UserError(f"HOROVOD_WHEEL={path}: the nodes need {name}")
    try:
        with zipfile.ZipFile(path) as wheel:
            built = files.parse(wheel.read("horovod/metadata.json").decode(), "JSON", f"HOROVOD_WHEEL={path}")
            library = next((wheel.read(one) for one in wheel.namelist() if LIBRARY.fullmatch(one)), b"")
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UserError(f"HOROVOD_WHEEL={path}: cannot be read as a wheel of Horovod: {error}") from None
    torch = str(built.get("pytorch") if isinstance(built, dict) else None).partition("+")[0]
    if torch != wanted:
        raise UserError(f"HOROVOD_WHEEL={path}: compiled for torch {torch}, the nodes have {wanted}")
    if MPI not in library:
        raise UserError(f"HOROVOD_WHEEL={path}: compiled without OpenMPI 4, which the nodes have")
