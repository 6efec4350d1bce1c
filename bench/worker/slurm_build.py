"""Build a virtual environment with torch and Horovod from files that travelled here; no network is used.

slurm_build FOLDER PYTHON DEVICE      a job runs it on one node, with the Python that the environment is made of

FOLDER/wheels has the packages, uv, and Horovod as source or as a wheel. FOLDER/venv is the result.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

# Launchers are not needed: Slurm starts the ranks, and Gloo or NCCL connects them.
COMMON = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# What the linker looks for and NVIDIA's wheels lack, as in roles/horovod/tasks/packages.yml.
LINKS = {"nccl/lib/libnccl.so": "libnccl.so.2", "cu13/lib64": "lib", "cu13/lib/libcudart.so": "libcudart.so.13"}
PROOF = "import horovod.torch as hvd; assert hvd.gloo_built()"


def say(text: str) -> None:
    print(f"@build {text}", flush=True)


def run(*words: str | Path, **variables: str) -> None:
    """A command whose output is the job's error output."""
    done = subprocess.run(list(map(str, words)), env={**os.environ, **variables}, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"Error: {Path(words[0]).name} {words[1]} ended with code {done.returncode}")


def check(wanted: str, compiles: bool) -> None:
    found = ".".join(map(str, sys.version_info[:2]))
    if found != wanted:
        sys.exit(
            f"Error: cluster.slurm.python is Python {found}, but the packages are for {wanted}: cluster.os_release"
        )
    missing = [name for name in ("g++", "make") if compiles and not shutil.which(name)]
    if missing:
        sys.exit(f"Error: {missing[0]} is missing on {os.uname().nodename}: name a module in cluster.slurm.modules")
    if compiles and not Path(sysconfig.get_path("include"), "Python.h").exists():
        sys.exit(f"Error: {sys.executable} has no Python.h to compile with: cluster.slurm.python needs another one")


def nvidia(venv: Path) -> dict[str, str]:
    """Variables to compile for GPUs with the toolkit in NVIDIA's wheels."""
    folder = next(venv.glob("lib/python3*/site-packages/nvidia"))
    for name, target in LINKS.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    return {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(folder / "nccl"),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_CUDA_HOME": str(folder / "cu13"),
        "CUDA_HOME": str(folder / "cu13"),
    }


def compiled(source: Path, venv: Path, device: str, build: Path) -> Path:
    folder = build / "source"
    folder.mkdir()
    run("tar", "--extract", "--strip-components=1", "--directory", folder, "--file", source)
    variables = COMMON | (nvidia(venv) if device == "cuda" else {})
    cores = len(os.sched_getaffinity(0))
    # cmake comes with the packages. The folder of a shared file system would slow the compiler down.
    variables |= {"PATH": f"{venv}/bin:{os.environ['PATH']}", "MAKEFLAGS": f"-j{cores}", "TMPDIR": str(build)}
    options: list[str | Path] = [
        "--no-cache-dir",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        build / "dist",
    ]
    run(venv / "bin/python", "-m", "pip", "wheel", *options, folder, **variables)
    return next((build / "dist").glob("*.whl"))


def main() -> int:
    folder, wanted, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    wheels, venv = folder / "wheels", folder / "venv"
    given = next(wheels.glob("horovod-*.whl"), None)
    check(wanted, compiles=given is None)
    shutil.rmtree(venv, ignore_errors=True)
    say("installing torch")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    found: list[str | Path] = [
        "--no-index",
        "--find-links",
        wheels,
        "--require-hashes",
        "--requirement",
        wheels / "requirements.txt",
    ]
    with tempfile.TemporaryDirectory() as tmp:
        cache = ["--cache-dir", f"{tmp}/uv", "--link-mode", "copy", "--compile-bytecode"]
        run(wheels / "uv", "pip", "install", "--quiet", "--python", venv / "bin/python", *cache, *found)
        if given is None:
            say("compiling Horovod")
            given = compiled(next(wheels.glob("horovod-*.tar.gz")), venv, device, Path(tmp))
        run(venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", given)
    run(venv / "bin/python", "-c", PROOF)
    shutil.rmtree(wheels)
    return 0
