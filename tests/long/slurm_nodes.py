"""Three local nodes with a real Slurm, two accounts on them, and what Slurm says about its jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e")]

import environments  # noqa: E402
from environments import BIN, ROOT, podman, run  # noqa: E402

NODES = ["head", "w1", "w2"]
# A partition whose jobs take the nodes of all others.
PREEMPTING = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "PartitionName": "urgent Nodes=ALL PriorityTier=10 MaxTime=UNLIMITED State=UP",
}
RANKS = "pgrep -af '[b]ench-worker/.* trials|[s]lurm_rank|[o]rted'"


class Site:
    """A local environment with feature slurm; alice is an ordinary account without sudo."""

    def __init__(self, env: str, second: int) -> None:
        self.env, self.second = env, second

    def write(self, **variables: object) -> None:
        """cluster.yml with the feature and these variables of roles."""
        self.change(lambda content: content["cluster"]["features"].update(slurm=True) or content.update(variables))

    def change(self, edit: Callable[[dict], object]) -> None:
        path = ROOT / "inventories" / self.env / "group_vars/all/cluster.yml"
        content = yaml.safe_load(path.read_text())
        edit(content)
        path.write_text(yaml.safe_dump(content))

    def on(self, node: str, command: str, user: str = "root", ok: bool = True) -> str:
        words = ["podman", "exec", "--user", user, "--workdir", "/tmp", f"{self.env}-{node}", "sh", "-c", command]
        return run(*words, ok=ok, timeout=180).stdout.strip()

    def head(self, command: str, user: str = "root", ok: bool = True) -> str:
        return self.on("head", command, user, ok)

    def add_alice(self) -> None:
        for node in NODES:
            self.on(node, "id alice > /dev/null 2>&1 || useradd --create-home --shell /bin/bash --uid 4001 alice")

    def jobs(self, states: str = "all") -> dict[str, str]:
        """Number -> state of every job."""
        lines = self.head(f"squeue --noheader --states={states} --format='%i %T'").splitlines()
        return dict(line.split() for line in lines)

    def job(self, number: str) -> dict[str, str]:
        words = self.head(f"scontrol --oneliner show job {number}").split()
        return dict(word.partition("=")[::2] for word in words)

    def submit(self, *options: str, user: str = "alice") -> str:
        return self.head(f"sbatch --parsable --output=/dev/null {' '.join(options)}", user)

    def running(self, prefix: str) -> str:
        """The number of the running job whose name begins so; "" if there is none."""
        lines = self.head("squeue --noheader --states=running --format='%i %j'").splitlines()
        return next((line.split()[0] for line in lines if line.split()[1].startswith(prefix)), "")

    def ranks(self) -> str:
        return "".join(podman("exec", f"{self.env}-{node}", "sh", "-c", RANKS) for node in NODES)

    def wait_idle(self) -> None:
        wanted = [f"{node}=idle" for node in NODES]
        wait(
            lambda: self.head("sinfo -h -N -p main -o %N=%T", ok=False).split() == wanted, 120, "the nodes are not idle"
        )


@contextmanager
def deployed(env: str, second: int, **variables: object) -> Iterator[Site]:
    environments.remove(env)
    environments.make_env(env, second, len(NODES))
    site = Site(env, second)
    site.write(**variables)
    try:
        environments.cluster("deploy", env=env)
        site.add_alice()
        yield site
    finally:
        environments.remove(env)


def wait(condition: Callable[[], object], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.5)


class Sweep:
    """bench sweep in the background."""

    def __init__(self, env: str, plan: Path, name: str) -> None:
        self.file = ROOT / f"results/{env}/{name}/trials.jsonl"
        self.argv = [str(BIN / "bench"), "sweep", "--env", env, "--plan", str(plan), "--run", name, "--no-check"]
        self.process = subprocess.Popen(
            self.argv,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Background jobs of a shell ignore SIGINT, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def trials(self) -> list[dict]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def measures(self) -> bool:
        """Whether a rank has begun to measure. A log is complete only at its end, but written line by line."""
        return any("WarmUp" in log.read_text() for log in self.file.parent.glob("logs/*.log"))

    def wait_until_it_measures(self) -> None:
        wait(lambda: self.measures() or self.process.poll() is not None, 180, "the sweep never began to measure")
        assert self.process.poll() is None, self.process.communicate()[0]

    def end(self, seconds: float = 240) -> str:
        return self.process.communicate(timeout=seconds)[0]


def write_plan(folder: Path, **values: object) -> Path:
    path = folder / "steps.yml"
    defaults = {"nodes": [3], "batches": [32], "fabrics": ["1g"], "engines": ["horovod-mpi"], "seconds": 8}
    path.write_text(yaml.safe_dump(defaults | values))
    return path
