"""Build torch and Horovod in the user's folder, by a job. The packages travel: compute nodes may have no internet."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from pathlib import Path

from bench.worker.protocol import Allocation
from cluster import gpus, horovod_wheel, wheelhouse
from cluster.core import files
from cluster.core.config import PYTHONS, ROOT, Cluster
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.slurm.jobs import Jobs
from cluster.providers.slurm.script import Request

COMPILE = ROOT / "roles/horovod/tasks/compile.yml"
MARK = "@build "


def edits() -> list[tuple[str, str, str]]:
    """What the role horovod edits in the source before it compiles: file, old text, new text."""
    task = next(one for one in files.document(COMPILE) if one["name"] == "Edit the build files")
    found = []
    for one in task["loop"]:
        texts = [one["file"], one["old"], one["new"]]
        for name, value in task["vars"].items():
            texts = [re.sub(r"\{\{ *" + name + r" *\}\}", value, text) for text in texts]
        found.append((texts[0], texts[1], texts[2]))
    return found


def edited(source: Path) -> bytes:
    """Horovod's source archive with these edits."""
    changed: dict[str, str] = {}
    buffer = io.BytesIO()
    with tarfile.open(source) as old, tarfile.open(fileobj=buffer, mode="w:gz") as new:
        members = {member.name.partition("/")[2]: member for member in old if member.isfile()}
        for file, before, after in edits():
            content = old.extractfile(members[file]) if file in members else None
            text = changed.get(file) or (content.read().decode() if content else "")
            if before not in text:
                raise InfraError(f"cannot patch {source.name}: {file} has no {before!r}")
            changed[file] = text.replace(before, after)
        for name, member in members.items():
            content = old.extractfile(member)
            data = changed[name].encode() if name in changed else content.read() if content else b""
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def build(jobs: Jobs, state: State, cluster: Cluster, progress: Progress) -> None:
    """Make the virtual environment, unless it is there and made of the same."""
    section, device = jobs.section, "cuda" if cluster.gpus_per_node else "cpu"
    if device == "cuda" and gpus.expected({cluster.gpu_model} - {"none"}) != gpus.NEWEST:
        raise UserError(
            f"cluster.slurm.build: not for {cluster.gpu_model}, which needs CUDA 12; install Horovod yourself"
        )
    name = "horovod-cuda" if device == "cuda" else "horovod"
    packages = wheelhouse.fill([name], cluster.os_release, state.log("wheels"), progress)[name]
    given = horovod_wheel.given(cluster)
    source = Path(given) if given else next(packages.glob("horovod-*.tar.gz"))
    recipe = source if given else COMPILE
    made_of = [
        packages.name,
        source.name,
        section.python,
        *section.modules,
        hashlib.sha256(recipe.read_bytes()).hexdigest(),
    ]
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    jobs.claim()
    record = f"{section.folder}/venv/made-of"
    if jobs.login.run(["cat", record]).stdout.decode().strip() == key:
        progress(f"torch and Horovod are in {section.folder}/venv already")
        return
    wheels = f"{section.folder}/wheels"
    with progress.part("build", "copying the packages to the cluster"):
        unpack = 'rm -rf "$1" && mkdir -p "$1" && tar -x -C "$1"'
        jobs.login.send(["sh", "-c", unpack, "sh", wheels], packages, without="./horovod-*")
        content = source.read_bytes() if given else edited(source)
        jobs.login.text(["sh", "-c", 'cat > "$1"', "sh", f"{wheels}/{source.name}"], content)
    python = ".".join(PYTHONS[cluster.os_release].split(".")[:2])
    words = [section.python, jobs.worker, "slurm_build", section.folder, python, device]
    request = Request(
        name=f"{cluster.name}-build",
        folder=jobs.folder(f"{cluster.name}-build"),
        nodes=1,
        slots=1,
        gpus=cluster.gpus_per_node,
        command=words,
    )

    def queued(event: Allocation) -> None:
        progress.now("build", f"job {event.job} is {event.state} {event.reason}".rstrip())

    jobs.tell = queued

    def show(line: str) -> None:
        if MARK in line:
            progress.now("build", f"in a job: {line.partition(MARK)[2]}")

    with progress.part("build", "waiting for a node to build torch and Horovod on", "torch and Horovod built"):
        try:
            jobs.run(request, {}, show)
        except KeyboardInterrupt:
            if job := jobs.known(request.name):
                jobs.cancel(request.name, job)
            raise
    jobs.login.text(["sh", "-c", 'cat > "$1"', "sh", record], f"{key}\n".encode())
