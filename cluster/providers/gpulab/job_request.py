"""GPULab job definitions (v4): one job with N GPUs, or N jobs with one GPU each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cluster.core.sections import Gpulab

# Where the project's storage is inside a job; what a set of jobs shares lies in a folder of its own in there.
SHARED = "/shared"


@dataclass(frozen=True)
class Shape:
    """How many jobs, and how many GPUs each gets; gpus is 0 where none are wanted (a trial run on CPUs)."""

    jobs: int
    slots: int
    gpus: int


def shape(mode: str, size: int, gpus: bool) -> Shape:
    """size processes, one per GPU."""
    jobs, slots = (1, size) if mode == "1xN" else (size, 1)
    return Shape(jobs, slots, slots if gpus else 0)


def definition(
    settings: Gpulab,
    name: str,
    slots: int,
    gpus: int,
    command: list[str],
    environment: dict[str, str],
    gpu_model: str = "none",
    start_before: datetime | None = None,
) -> dict[str, Any]:
    """One job as gpulab-cli submits it."""
    resources: dict[str, Any] = {
        "cpus": settings.cpus_per_gpu * slots,
        "gpus": gpus,
        "cpuMemoryGb": settings.memory_gb_per_gpu * slots,
    }
    if settings.cluster_id is not None:
        resources["clusterId"] = settings.cluster_id
    if gpus and gpu_model != "none":
        resources["gpuModel"] = [gpu_model]
    scheduling: dict[str, Any] = {"maxDuration": f"{settings.minutes} minutes"}
    if start_before:
        # Should we be gone by then, GPULab itself gives up on a set that is not complete.
        scheduling["notAfter"] = start_before.isoformat(timespec="seconds")
    return {
        "name": name,
        "description": "horovod-reference-cluster",
        "request": {
            "resources": resources,
            "docker": {
                "image": settings.image,
                "command": command,
                "environment": environment,
                "storage": [{"hostPath": settings.storage, "containerPath": SHARED}],
            },
            "scheduling": scheduling,
        },
    }


def definitions(
    settings: Gpulab,
    run: str,
    wanted: Shape,
    command: list[str],
    environment: dict[str, str],
    gpu_model: str,
    now: datetime,
) -> list[dict[str, Any]]:
    """The jobs of a set; each is told its number, the set's size and the folder they share."""
    return [
        definition(
            settings,
            f"{run}-{number:02}",
            wanted.slots,
            wanted.gpus,
            command,
            {
                **environment,
                "JOB_NUMBER": str(number),
                "JOB_COUNT": str(wanted.jobs),
                "JOB_SLOTS": str(wanted.slots),
                "JOB_FOLDER": f"{SHARED}/horovod-cluster/{run}",
                "JOB_START_SECONDS": str(settings.start_minutes * 60),
            },
            gpu_model,
            now + timedelta(minutes=settings.start_minutes),
        )
        for number in range(wanted.jobs)
    ]
