"""A copy of the project in which generated cases run: its own home, cache, results, state and programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/cli"))

from project import REQUIRED, copy_project, terraform_type  # noqa: E402
from project import contract as deployed_contract  # noqa: E402

from bench.worker import protocol  # noqa: E402

ENV = "fuzz"
FIXTURES = ROOT / "tests/fixtures/runs"
# A command that takes longer hangs.
LIMIT_SECONDS = 10
# A command prints no more on standard error than a terminal shows at a glance.
MOST_LINES, MOST_BYTES = 3, 4000
# Of a command whose standard output is JSON.
PROGRESS = re.compile(r"\[ *([0-9.]+ s|[0-9]+/[0-9]+)\] |round [0-9]+: ")
TOOLS = (
    *("ansible", "ansible-playbook", "git", "java", "mmdebstrap", "nft", "openssl", "pip", "podman", "python", "rsync"),
    *("sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue"),
    *("ssh", "ssh-keygen", "ssh-keyscan", "sudo", "systemctl", "tar", "terraform"),
)
# Answers as a case wants them. Terraform's output comes from the state file, as the real one's does.
STUB = """#!{python} -IS
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "terraform" and "version" in words:
    print("Terraform v1.9.0")
elif name == "terraform" and "output" in words:
    state = next((word.partition("=")[2] for word in words if word.startswith("-state=")), "")
    try:
        with open(state, encoding="utf-8") as file:
            print(json.dumps(json.load(file)["outputs"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        sys.exit(f"Error: {{error}}")
elif name == "ssh-keygen" and "-f" in words and "-q" in words:
    for suffix in ("", ".pub"):
        with open(words[words.index("-f") + 1] + suffix, "w") as file:
            file.write("ssh-ed25519 AAAA stub")
else:
    sys.stdout.write(os.environ.get("FUZZ_ANSWER", ""))
    sys.stderr.write(os.environ.get("FUZZ_COMPLAINT", ""))
    sys.exit(int(os.environ.get("FUZZ_EXIT", "0")))
"""
CONVERGE = {"engines": ["horovod"], "fabrics": ["1g"], "nodes": [2], "large_batches": [], "seeds": 1, "images": 256}
PLAN = {"nodes": [1, 2], "batches": [32], "fabrics": ["1g"], "engines": ["horovod-mpi"], "seconds": 1, "repeats": 1}
VALIDATION = {
    **{"fabric": "1g", "rate_gbps": 1, "mpi": "2 ranks: sum 1", "share": None},
    "ring": [{"node": "head", "to": "w1", "gbps": 0.95, "wire_gbps": 0.97, "reachable": True}],
}
TUNING = {"tuning": {"1g": {"engine": "horovod-gloo", "fusion_mb": 64.0, "cycle_ms": 2.0}}}
RUN = {
    **{"id": "r", "command": "python train.py", "engine": "horovod", "nodes": ["head"], "groups": []},
    "points": [{"name": ".", "words": ["python", "train.py"], "values": {}}],
}
RECOVERY = {
    **{"seconds": 5.0, "stood": 6.0, "steps_lost": 0, "before": 9.0, "after": 6.0, "nodes_before": 3, "nodes_after": 2},
}
FAULT = {"fault": "rank killed", "round": 1, "node": "w1", "at": 1.0, "recovery": RECOVERY, "series": [[0.0, 9.0]]}
NODE_FACTS = {
    **{"node": "n1", "python": "3.11", "torch": "2.13", "horovod": "0.28.1", "cpu_level": 3, "cores": 8},
    **{"interface": "eth0", "interfaces": {"eth0": "10.0.0.1"}, "adapters": [], "gpus": []},
}
# GPULab's and Slurm's in one: each reads its own fields.
PROBE = {"ranks": 1, "right": True, "nodes": [NODE_FACTS], "jobs": 2, "unreachable": [], "interface": "eth0"}
EXPERIMENT = {"name": ENV, "backend": "jfed", "state": "ready", "expires": "2100-01-01T00:00:00+00:00"}
NODES = {"user": "me", "jump_host": None, "addresses": {"head": "10.0.0.1"}, "interfaces": {"1g": "eth1"}}
MODEL = "layer,shapes,macs,activations\nimages,3x224x224,,\na,64x3x7x7 64,118013952,802816\nb,1000x64,64000,1000\n"
TABLE = ROOT / "bench/catalogue/published/hkbu-2020.csv"


@dataclass
class Case:
    """One run of a command. Files are relative to the sandbox; None removes the file."""

    command: str
    argv: list[str]
    files: dict[str, bytes | None] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        changed = "".join(f"\n    {path}: {shown(content)}" for path, content in self.files.items())
        stub = "".join(f"\n    {name}={value!r:.200}" for name, value in self.env.items())
        return f"{self.name}: {self.command} {' '.join(ascii(word)[:300] for word in self.argv)}{changed}{stub}"


def shown(content: bytes | None) -> str:
    return "removed" if content is None else f"{len(content)} bytes {content[:300]!r}"


@dataclass(frozen=True)
class Outcome:
    code: int | None
    seconds: float
    stdout: str
    stderr: str
    findings: tuple[str, ...]

    def problems(self) -> list[str]:
        """What a user or a script would trip over."""
        found = [f"stray: {text}" for text in self.findings]
        if self.code is None:
            return [*found, f"hang: over {LIMIT_SECONDS} s"]
        if "Traceback" in self.stderr or "this is a bug" in self.stderr:
            found.append("traceback")
        if self.code not in (0, 1, 2, 3):
            found.append(f"exit {self.code}")
        said = [line for line in self.stderr.splitlines() if not PROGRESS.match(line)]
        if len(said) > MOST_LINES or len(self.stderr) > MOST_BYTES:
            found.append(f"{len(said)} lines, {len(self.stderr)} bytes of stderr")
        if "\x1b" in self.stdout + self.stderr:
            found.append("escape sequence in the output")
        if self.code in (2, 3) and not self.stderr.strip():
            found.append(f"exit {self.code} without a message")
        return found


class Sandbox:
    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.project = copy_project(tmp / "project")
        self.environments = {path.name for path in (self.project / "inventories").iterdir()}
        self.stubs = tmp / "stubs"
        self.template = tmp / "template"
        self.home, self.cache, self.temporary = tmp / "home", tmp / "cache", tmp / "tmp"
        self.streams = {name: tmp / f"streams/{name}" for name in ("stdout", "stderr", "findings")}
        for folder in (self.stubs, self.home, self.cache / "horovod-cluster", self.temporary, tmp / "streams"):
            folder.mkdir(parents=True)
        for name in TOOLS:
            (self.stubs / name).write_text(STUB.format(python=sys.executable))
            (self.stubs / name).chmod(0o755)
        self._write_template()
        # What a case may change, relative to the sandbox; set up anew before each.
        self.changing = [path.relative_to(self.template) for path in self._parts()]
        self.allowed = [str(tmp / path) for path in self.changing]
        # A temporary file that stays is found at the end.
        self.allowed += [str(self.cache / "horovod-cluster"), str(self.temporary), "/dev"]
        known = [name for env in (ENV, *self.environments) for name in (env, f"{env}.lock")]
        self.allowed += [str(self.project / ".state" / name) for name in (*known, "jupyter-url")]
        env = {
            **{"PATH": str(self.stubs), "HOME": str(self.home), "XDG_CACHE_HOME": str(self.cache)},
            **{"TMPDIR": str(self.temporary), "PYTHONPATH": str(self.project), "PYTHONDONTWRITEBYTECODE": "1"},
            **{"FUZZ_STUBS": str(self.stubs), "AWS_EC2_METADATA_DISABLED": "true", "OPENBLAS_NUM_THREADS": "1"},
            **{"LANG": "C.UTF-8", "HOROVOD_CLUSTER_MACHINE_LOCK": str(self.cache / "horovod-cluster/machine.lock")},
        }
        argv = [sys.executable, str(Path(__file__).parent / "server.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen(argv, cwd=self.project, env=env, text=True, **pipes)  # type: ignore[call-overload]
        self._answer()
        self.before = self.listing()

    def _parts(self) -> list[Path]:
        project = self.template / "project"
        return [self.template / "work", project / ".state" / ENV, project / f"inventories/{ENV}", project / "results"]

    def _write_template(self) -> None:
        work, state, inventory, results = self._parts()
        for folder in (work, state, inventory / "group_vars/all", results / ENV):
            folder.mkdir(parents=True)
        # Names of the template's files are those of the sandbox.
        real_state = self.project / ".state" / ENV
        cluster = {"cluster": {**REQUIRED, "name": ENV}}
        write(inventory / "group_vars/all/cluster.yml", cluster)
        write(inventory / "tuning.yml", TUNING)
        value = deployed_contract(real_state)
        outputs = {"cluster": {"value": value, "type": terraform_type(value)}}
        head = {"version": 4, "terraform_version": "1.7.0", "serial": 1, "lineage": ENV, "resources": []}
        write(state / "terraform.tfstate", {**head, "outputs": outputs})
        write(state / "cluster.yml", cluster)
        write(state / "validation.json", VALIDATION)
        (state / "known_hosts").write_text("10.99.0.10 ssh-ed25519 AAAA\n")
        for name in ("id_ed25519", "id_ed25519.pub", "mesh_ed25519", "mesh_ed25519.pub"):
            (state / name).write_text("ssh-ed25519 AAAA stub")
        write(state / "run.json", {"id": "r", "question": ["ssh", "systemctl", "is-active", "run-r-launch"]})
        write(state / "probe.json", PROBE)
        write(state / "experiment.json", EXPERIMENT)
        write(state / "nodes.json", NODES)
        (state / "jobs.jsonl").write_text(json.dumps({"event": "submitted", "name": "r", "id": "1"}) + "\n")
        write(work / "plan.yml", PLAN)
        write(work / "converge.yml", CONVERGE)
        write(work / "prices.yml", {"gpu": 1, "node": 2, "ports": {"tcp": {"10": 3}}})
        (work / "mine.csv").write_text(MODEL)
        (work / "train.py").write_text("print(1)\n")
        (work / "requirements.txt").write_text("humanize\n")
        (work / "log.txt").write_text("a line\n" + event_line())
        for folder, name, content in (("runs/r", "run.json", RUN), ("elastic/e", "faults.jsonl", FAULT)):
            (results / ENV / folder).mkdir(parents=True)
            (results / ENV / folder / name).write_text(json.dumps(content) + "\n")
        shutil.copy(FIXTURES / "horovod-timeline.json", work / "timeline.json")
        shutil.copy(TABLE, work / "table.csv")
        copies = {"decode-cpu": work / "a", "network-1g": work / "b", "engines": results / ENV / "r"}
        for name, target in copies.items():
            shutil.copytree(FIXTURES / name, target)

    def add_data(self) -> None:
        """A data set of four images and a tree as ImageNet has it, made by the command itself."""
        work = self.template / "work"
        made = self.run(Case("bench", ["data", "make", "--images", "4", "--out", "data"]))
        assert made.code == 0, made.stderr
        shutil.copytree(self.tmp / "work/data", work / "data")
        tree = work / "imagenet/train/n00000001"
        tree.mkdir(parents=True)
        (tree / "a.JPEG").write_bytes(b"\xff\xd8\xff not an image")

    def _answer(self) -> dict[str, Any]:
        assert self.server.stdout
        line = self.server.stdout.readline()
        assert line, "the server has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def reset(self) -> None:
        for path in self.changing:
            shutil.rmtree(self.tmp / path, ignore_errors=True)
            shutil.copytree(self.template / path, self.tmp / path)
        folders = {self.project / ".state": {ENV}, self.project / "inventories": {ENV, *self.environments}}
        for folder, kept in folders.items():
            for extra in folder.iterdir():
                if extra.name not in kept:
                    shutil.rmtree(extra) if extra.is_dir() else extra.unlink()

    def content(self, path: str) -> bytes:
        return (self.template / path).read_bytes()

    def run(self, case: Case, seconds: float = LIMIT_SECONDS) -> Outcome:
        self.reset()
        for path, content in case.files.items():
            file = self.tmp / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True) if content is None else file.write_bytes(content)
        allowed = self.allowed
        if "env" in case.argv[:3]:
            # `cluster env` makes an environment.
            allowed = [*allowed, str(self.project / "inventories")]
        request = {
            **{"command": case.command, "argv": [os.fsencode(word).hex() for word in case.argv], "env": case.env},
            **{"cwd": str(self.tmp / "work"), "allowed": allowed, "programs": str(self.tmp)},
            **{name: str(path) for name, path in self.streams.items()},
            "seconds": seconds,
        }
        assert self.server.stdin
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = self._answer()
        out, err, findings = (path.read_text(errors="replace") for path in self.streams.values())
        return Outcome(answer["code"], answer["seconds"], out, err, tuple(findings.splitlines()))

    def listing(self) -> set[str]:
        """Every file that a case must not touch."""
        self.reset()
        changing = {str(self.tmp / path) for path in self.changing} | {str(self.project / ".state")}
        changing |= {str(self.template), str(self.tmp / "streams"), str(self.cache / "horovod-cluster")}
        found = set()
        for folder, names, files in os.walk(self.tmp):
            names[:] = [name for name in names if f"{folder}/{name}" not in changing]
            found |= {f"{folder}/{name}" for name in files}
        return found

    def close(self) -> None:
        assert self.server.stdin
        self.server.stdin.close()
        self.server.wait(timeout=20)


def event_line() -> str:
    """What a worker prints whose launch failed."""
    return f"{protocol.MARK}{json.dumps({'event': 'Failed', 'error': 'x'})}\n"


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))
