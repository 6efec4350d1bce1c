"""The batch script of a job. Pure functions: what they return is in tests/testbeds/golden."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.core.slurm_section import Slurm

# Seconds before the time limit at which the script ends the step, so that its output is complete.
WARNING_SECONDS = 90
SCRIPT = """\
#!/bin/bash
{directives}
# Slurm runs this script again from the start when it requeues the job.
cd {folder} || exit 1
rm -f code why
attempt=${{SLURM_RESTART_COUNT:-0}}
if [ "$attempt" -gt {requeues} ]; then
  echo "it was requeued more than {requeues} times" > why
  echo 1 > code
  exit 1
fi
{modules}{exports}late() {{
  echo "its time limit of {minutes} minutes is near" > why
  kill -TERM "$step"
}}
trap late USR1
echo "$attempt" > attempt
{command} > "out.$attempt" 2> "err.$attempt" &
step=$!
wait "$step"
code=$?
# The signal ended the wait, not the step.
while kill -0 "$step" 2> /dev/null; do
  wait "$step"
  code=$?
done
# A job that is being requeued ends here, without a code.
[ "$code" = 0 ] || sleep 3
echo "$code" > code
exit "$code"
"""


@dataclass(frozen=True)
class Request:
    """A job: the command of every rank, and on how many nodes."""

    name: str
    folder: str
    nodes: int
    slots: int
    command: Sequence[str]
    gpus: int = 0
    minutes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def gpu_option(count: int, model: str) -> list[str]:
    kind = "" if model == "none" else f"{model}:"
    return [f"--gpus-per-node={kind}{count}"] if count else []


def options(section: Slurm, request: Request, gpu_model: str) -> list[str]:
    """The options of sbatch, which also go into a test of what the cluster accepts."""
    names = ("partition", "account", "qos", "constraint", "reservation")
    chosen = [f"--{name}={getattr(section, name)}" for name in names if getattr(section, name)]
    return [
        *(f"--job-name={request.name}", f"--nodes={request.nodes}", f"--ntasks-per-node={request.slots}"),
        *(f"--time={request.minutes or section.minutes}", *chosen, *gpu_option(request.gpus, gpu_model)),
        # Whole nodes: nobody else disturbs a measurement.
        *("--exclusive", "--overcommit", "--requeue", "--open-mode=append", *section.options),
    ]


def render(section: Slurm, request: Request, gpu_model: str) -> str:
    given = [*options(section, request, gpu_model), f"--output={request.folder}/job.log"]
    if 60 * (request.minutes or section.minutes) > 2 * WARNING_SECONDS:
        given.append(f"--signal=B:USR1@{WARNING_SECONDS}")
    step = ["srun", "--overcommit", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", *request.command]
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(request.environment.items())]
    modules = [f"module load {name} || exit 1\n" for name in section.modules]
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in given),
        folder=shlex.quote(request.folder),
        requeues=section.requeues,
        minutes=request.minutes or section.minutes,
        modules="".join(modules),
        exports="".join(exports),
        command=shlex.join(step),
    )
