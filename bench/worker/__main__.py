"""The worker's programs. On nodes: python FOLDER PROGRAM ARGUMENTS, where FOLDER has this file beside bench/."""

import importlib
import sys

PROGRAMS = (
    *(
        "check_devices",
        "collectives",
        "fabric",
        "gpulab_job",
        "links",
        "run_agent",
        "run_end",
        "run_follow",
        "run_launch",
    ),
    "learn",
    *("run_packages", "run_rank", "run_torchrun", "slurm_build", "slurm_launch", "slurm_probe", "slurm_rank"),
    *("stages", "supervise"),
    *("topology", "trials", "verify", "verify_split"),
)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"Error: name one of {', '.join(PROGRAMS)}")
    program = sys.argv.pop(1)
    sys.exit(importlib.import_module(f"bench.worker.{program}").main())


if __name__ == "__main__":
    main()
