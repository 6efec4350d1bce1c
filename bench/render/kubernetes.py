"""Manifests of a run on Kubernetes: an indexed Job with a headless service, or an MPIJob of Kubeflow's operator.

TrainJob is not rendered: its API is alpha (trainer.kubeflow.org/v1alpha1), and Trainer 2.2 replaced the fields that
shared memory and RDMA devices need.
"""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.run import source
from cluster.core.errors import UserError
from cluster.core.sections import Kubernetes

Manifest = dict[str, Any]
CODE, DATA, CONFIG = "/work", "/data", "/config"
ARCHIVE = "code.tgz"
# Kubernetes refuses larger ConfigMaps; base64 takes a third more.
LARGEST_CODE = 700 << 10
PORT = 29500
# The node image may forbid what the operator needs: a login as root with its key.
SSHD = (
    "mkdir -p /run/sshd && ssh-keygen -A && exec /usr/sbin/sshd -De -f /dev/null -o PermitRootLogin=prohibit-password "
    "-o AuthorizedKeysFile=/root/.ssh/authorized_keys -o StrictModes=no"
)


@dataclass(frozen=True)
class Run:
    """What is rendered. `words` is the program of one rank."""

    name: str
    words: tuple[str, ...]
    nodes: int
    processes: int
    gpus: int
    settings: Kubernetes
    # What the pods find in CONFIG, by name.
    files: dict[str, bytes] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": self.name, "app.kubernetes.io/managed-by": "bench"}

    def metadata(self, **more: Any) -> Manifest:
        return {"name": self.name, "namespace": self.settings.namespace, "labels": self.labels, **more}


def packed(folder: Path) -> bytes:
    """The folder's files, as `bench run` copies them. The same files give the same bytes."""
    chosen = list(source.to_copy(folder))
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for path in chosen:
            tar.add(folder / path, str(path), recursive=False, filter=_anonymous)
            if buffer.tell() > LARGEST_CODE:
                break
    if len(buffer.getvalue()) > LARGEST_CODE:
        fix = "list what it needs not in .runignore, or put the code into the image and add --no-code"
        raise UserError(f"--folder {folder}: more than {LARGEST_CODE >> 10} KiB packed; {fix}")
    return buffer.getvalue()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def job(run: Run) -> list[Manifest]:
    """One pod per node; torchrun in each finds the first by its name in the headless service."""
    start = ["torchrun", f"--nnodes={run.nodes}", f"--nproc-per-node={run.processes}"]
    start += [f"--master-addr={run.name}-0.{run.name}", f"--master-port={PORT}", "--no-python"]
    script = f'{_unpack(run)}exec {" ".join(start)} --node-rank="$JOB_COMPLETION_INDEX" "$@"'
    pod = _pod(run, ["sh", "-c", script, "sh", *run.words])
    pod["spec"] |= {"subdomain": run.name, "restartPolicy": "Never"}
    queue = {"kueue.x-k8s.io/queue-name": run.settings.queue} if run.settings.queue else {}
    spec: Manifest = {
        "completions": run.nodes,
        "parallelism": run.nodes,
        "completionMode": "Indexed",
        # A rank that fails ends the others, and a new one cannot join them.
        "backoffLimit": 0,
        "activeDeadlineSeconds": 60 * run.settings.minutes,
        "template": pod,
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": run.metadata(),
        "spec": {
            "clusterIP": "None",
            # The ranks look for each other before they are ready.
            "publishNotReadyAddresses": True,
            "selector": run.labels,
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    found: Manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": run.metadata(), "spec": spec}
    found["metadata"]["labels"] = run.labels | queue
    return [*_common(run), service, found]


def mpijob(run: Run) -> list[Manifest]:
    """A launcher with mpirun, and workers with sshd, where ranks run. The operator gives keys and the list of hosts."""
    slots = run.processes
    options = ["--bind-to", "none", "--map-by", f"ppr:{slots}:node", "-np", str(run.nodes * slots)]
    options += ["-mca", "btl_tcp_if_include", run.settings.interface]
    options += ["-mca", "plm_rsh_args", "-o StrictHostKeyChecking=no -o ConnectionAttempts=30"]
    # mpirun passes variables to the first node only, unless it is told which.
    options += [word for name in ("PATH", *_environment(run)) for word in ("-x", name)]
    if ARCHIVE in run.files:
        options += ["-wdir", CODE]
    launcher = _pod(run, ["mpirun", *options, *run.words], worker=False)
    worker = _pod(run, ["sh", "-c", _unpack(run) + SSHD], sshd=True)
    labels = {"kueue.x-k8s.io/queue-name": run.settings.queue} if run.settings.queue else {}
    spec: Manifest = {
        "slotsPerWorker": slots,
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": 0,
            "activeDeadlineSeconds": 60 * run.settings.minutes,
        },
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            "Worker": {"replicas": run.nodes, "restartPolicy": "Never", "template": worker},
        },
    }
    found: Manifest = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": run.metadata(), "spec": spec}
    found["metadata"]["labels"] = run.labels | labels
    return [*_common(run), found]


FORMS = {"job": job, "mpijob": mpijob}


def _common(run: Run) -> list[Manifest]:
    """Only the pods of a run reach each other's ports: the rendezvous and NCCL have no passwords."""
    policy: Manifest = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": run.metadata(),
        "spec": {
            "podSelector": {"matchLabels": run.labels},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": run.labels}}]}],
        },
    }
    if not run.files:
        return [policy]
    data = {name: base64.b64encode(content).decode() for name, content in run.files.items()}
    return [policy, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": run.metadata(), "binaryData": data}]


def _unpack(run: Run) -> str:
    return f"mkdir -p {CODE} && tar xzf {CONFIG}/{ARCHIVE} -C {CODE} && cd {CODE} && " if ARCHIVE in run.files else ""


def _environment(run: Run) -> dict[str, str]:
    card = run.settings.interface
    found = {"PYTHONUNBUFFERED": "1", "NCCL_SOCKET_IFNAME": f"={card}"}
    found |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"), card)
    if run.settings.rdma_resource is None:
        found["NCCL_IB_DISABLE"] = "1"
    if run.settings.claim:
        found["RUN_DATA"] = DATA
    return found | run.variables


def _pod(run: Run, command: Sequence[str], worker: bool = True, sshd: bool = False) -> Manifest:
    """A pod's template. The launcher of an MPIJob computes nothing."""
    asked = run.settings
    volumes: dict[str, tuple[str, Manifest]] = {}
    if run.files and worker:
        volumes["config"] = CONFIG, {"configMap": {"name": run.name}}
    resources: Manifest = {}
    if worker:
        memory = {"medium": "Memory", "sizeLimit": f"{asked.shared_memory_gb}Gi"}
        volumes["shared-memory"] = "/dev/shm", {"emptyDir": memory}  # noqa: S108 (of the pod)
        if asked.claim:
            volumes["data"] = DATA, {"persistentVolumeClaim": {"claimName": asked.claim}}
        resources = _resources(run)
    added = ["IPC_LOCK"] if worker and asked.rdma_resource else []
    # sshd changes users and its root folder.
    added += ["SETUID", "SETGID", "SYS_CHROOT", "AUDIT_WRITE", "DAC_OVERRIDE", "CHOWN", "FOWNER"] if sshd else []
    dropped: Manifest = {"drop": ["ALL"]} | ({"add": added} if added else {})
    container: Manifest = {
        "name": "train" if worker else "launch",
        "image": asked.image,
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in _environment(run).items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": dropped},
    }
    if volumes:
        container["volumeMounts"] = [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()]
    if resources:
        container["resources"] = {"limits": resources}
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if volumes:
        spec["volumes"] = [{"name": name, **kind} for name, (_, kind) in volumes.items()]
    if asked.pull_secret:
        spec["imagePullSecrets"] = [{"name": asked.pull_secret}]
    labels = dict(run.labels)
    if worker:
        labels["bench/part"] = "rank"
        alone = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": "kubernetes.io/hostname"}
        # --nodes means machines.
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}}
    metadata: Manifest = {"labels": labels}
    if asked.network and worker:
        metadata["annotations"] = {"k8s.v1.cni.cncf.io/networks": asked.network}
    return {"metadata": metadata, "spec": spec}


def _resources(run: Run) -> Manifest:
    asked = run.settings
    found: Manifest = {}
    if run.gpus:
        found[asked.gpu_resource] = run.gpus
    if asked.rdma_resource:
        found[asked.rdma_resource] = 1
    if asked.cpus:
        found["cpu"] = asked.cpus
    if asked.memory_gb:
        found["memory"] = f"{asked.memory_gb}Gi"
    return found
