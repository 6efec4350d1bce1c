"""GPULab job definitions (v4): one job with N GPUs, or N jobs with one GPU each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cluster.core import sections

# Where the project's storage is mounted in a job. Each set of jobs shares a folder in it.
SHARED = "/shared"
Definition = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Number of jobs, and ranks (slots) and GPUs of each; gpus is 0 for a run on CPUs."""

    jobs: int
    slots: int
    gpus: int


def choose_shape(mode: str, size: int, gpus: bool) -> Shape:
    """The shape for this many ranks, one per GPU."""
    jobs, slots = (1, size) if mode == "1xN" else (size, 1)
    return Shape(jobs, slots, slots if gpus else 0)


def definitions(
    section: sections.Gpulab,
    set_name: str,
    shape: Shape,
    command: list[str],
    environment: dict[str, str],
    gpu_model: str,
    now: datetime,
) -> list[Definition]:
    """The jobs of one set as gpulab-cli submits them. Each knows its number, the set's size and the shared folder."""

    def definition(number: int) -> Definition:
        resources: dict[str, Any] = {
            "cpus": section.cpus_per_gpu * shape.slots,
            "gpus": shape.gpus,
            "cpuMemoryGb": section.memory_gb_per_gpu * shape.slots,
        }
        if section.cluster_id is not None:
            resources["clusterId"] = section.cluster_id
        if shape.gpus and gpu_model != "none":
            resources["gpuModel"] = [gpu_model]
        job_environment = {
            **environment,
            "JOB_NUMBER": str(number),
            "JOB_COUNT": str(shape.jobs),
            "JOB_SLOTS": str(shape.slots),
            "JOB_FOLDER": f"{SHARED}/horovod-cluster/{set_name}",
            "JOB_START_SECONDS": str(section.start_minutes * 60),
        }
        start_before = now + timedelta(minutes=section.start_minutes)
        return {
            "name": f"{set_name}-{number:02}",
            "description": "horovod-reference-cluster",
            "request": {
                "resources": resources,
                "docker": {
                    "image": section.image,
                    "command": command,
                    "environment": job_environment,
                    "storage": [{"hostPath": section.storage, "containerPath": SHARED}],
                },
                "scheduling": {
                    "maxDuration": f"{section.minutes} minutes",
                    # If we are gone by then, GPULab itself cancels jobs that have not started.
                    "notAfter": start_before.isoformat(timespec="seconds"),
                },
            },
        }

    return [definition(number) for number in range(shape.jobs)]
