"""Faults of nodes, controller and disk. Each is injected at a moment that the caller chooses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
sys.path.insert(0, str(ROOT))

from cluster.core.state import State  # noqa: E402
from cluster.providers.local import machine  # noqa: E402
from cluster.providers.local.provider import podman_settings  # noqa: E402

SUDO = [] if os.geteuid() == 0 else ["sudo", "-n"]


def call(*words: str | Path, check: bool = True) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=ROOT)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def podman(*words: str, check: bool = True) -> str:
    return call(*SUDO, "podman", *words, check=check)


@dataclass
class Scene:
    """What a fault may touch: one local environment, its results on a small disk, and a command that runs on it."""

    env: str
    nodes: list[str]
    victim: str = ""
    command: subprocess.Popen[str] | None = None

    @property
    def state(self) -> State:
        return State(self.env)

    @property
    def results(self) -> Path:
        return ROOT / "results" / self.env

    @property
    def filler(self) -> Path:
        return self.results / "filler"

    def container(self, node: str) -> str:
        return f"{self.env}-{node}"

    def node(self, *words: str) -> None:
        """podman WORDS victim."""
        podman(*words, self.container(self.victim))

    def restart(self) -> None:
        # With our settings: podman's default backend may not know the networks, and the node would not start.
        with podman_settings() as settings:
            machine.podman("restart", "-t", "0", self.container(self.victim), env=settings)

    def inside(self, *words: str) -> None:
        podman("exec", self.container(self.victim), *words)

    def send(self, number: signal.Signals) -> None:
        assert self.command
        self.command.send_signal(number)

    def fill_disk(self) -> None:
        free = shutil.disk_usage(self.results).free
        with self.filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)


def leave_a_rate(scene: Scene) -> None:
    scene.send(signal.SIGKILL)
    scene.inside("fabric-rate", "set", "125")


@dataclass(frozen=True)
class Fault:
    """state: what podman says about the victim afterwards. healthy: whether `status` must find nothing to repair."""

    name: str
    inject: Callable[[Scene], object]
    state: str = "running"
    healthy: bool = False


FAULTS = [
    Fault("node stopped", lambda s: s.node("stop", "-t", "0"), state="exited"),
    Fault("node killed", lambda s: s.node("kill"), state="exited"),
    Fault("node removed", lambda s: s.node("rm", "-f", "-t", "0"), state="missing"),
    Fault("node paused", lambda s: s.node("pause"), state="paused"),
    Fault("node restarted", lambda s: s.restart(), healthy=True),
    Fault("firewall stopped", lambda s: s.inside("systemctl", "stop", "cluster-firewall")),
    Fault("SSH server stopped", lambda s: s.inside("systemctl", "stop", "ssh.socket", "ssh.service")),
    Fault("rate left behind", leave_a_rate),
    Fault("controller killed", lambda s: s.send(signal.SIGKILL)),
    Fault("controller terminated", lambda s: s.send(signal.SIGTERM), healthy=True),
    Fault("controller interrupted", lambda s: s.send(signal.SIGINT), healthy=True),
    Fault("disk full", lambda s: s.fill_disk(), healthy=True),
]
