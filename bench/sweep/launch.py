"""Commands that start the worker, or a user's program, on the head: one function per launcher, which builds words."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bench.sweep import nccl_log
from bench.worker import fabric
from cluster import fabric_settings, tuning
from cluster.core import worker_files
from cluster.core.config import layout
from cluster.core.contract import TransportName
from cluster.tuning import Tuning

PYTHON = f"{layout()['venv']}/bin/python"
# Our wrapper checks host keys; Horovod's own command does not (roles/horovod).
HOROVODRUN = "/usr/local/bin/horovodrun"
TORCHRUN = f"{layout()['venv']}/bin/torchrun"
MASTER_PORT = 29500
# Adds what only some nodes have: RDMA devices and the settings of NCCL.
PODMAN = (
    'test -d /dev/infiniband && set -- --device=/dev/infiniband "$@"; '
    'test -f /etc/nccl.conf && set -- --volume=/etc/nccl.conf:/etc/nccl.conf:ro "$@"; '
    'exec podman run "$@"'
)


@dataclass(frozen=True)
class SpecFile:
    """Path of a spec on every node, its checksum, and the index of a launch in it."""

    path: str
    sha256: str
    part: int = 0


@dataclass(frozen=True)
class Launch:
    """The input of every launcher."""

    run: str
    engine: str
    hosts: tuple[str, ...]
    slots: int
    subnet: str
    interface: str  # on the head
    spec: SpecFile = SpecFile("", "")
    transport: TransportName = "tcp"
    program: str = "trials"
    # A user's program instead of the worker, with the settings of the real cluster instead of the scale model's.
    words: tuple[str, ...] = ()
    settings: Tuning = field(default_factory=Tuning)
    scale: float = 1.0
    slowdown: float = 1.0
    cuda: bool = False
    container: str | None = None
    torchrun: bool = False
    slurm: bool = False  # inside an allocation of Slurm
    timeline: str | None = None
    name: str = ""  # what a later sweep of the same run calls the same launch
    volumes: tuple[str, ...] = (f"{worker_files.ON_NODE}:{worker_files.ON_NODE}:ro",)  # of the container

    @property
    def host_list(self) -> str:
        return ",".join(f"{host}:{self.slots}" for host in self.hosts)

    @property
    def processes(self) -> int:
        return len(self.hosts) * self.slots

    @property
    def command(self) -> list[str]:
        """The command of the worker or the user's, inside the training container if there is one."""
        return [*self.container_command, *(self.words or (PYTHON, *self.worker_words))]

    @property
    def worker_words(self) -> list[str]:
        spec = ["--spec", self.spec.path, "--sha256", self.spec.sha256, "--part", str(self.spec.part)]
        return [worker_files.folder(), self.program, *spec, "--launch", self.run]

    @property
    def container_command(self) -> list[str]:
        """podman with the host's network, for the fabric, and with the launcher's variables and folder.

        The launcher identifies a rank by its user id, so the account keeps its id in the container. NCCL needs the
        shared memory of the node, RDMA its limit of locked memory.
        """
        if not self.container:
            return []
        podman = [
            "sh",
            "-c",
            PODMAN,
            "podman",
            "--rm",
            "--network=host",
            "--ipc=host",
            "--pid=host",
            "--userns=keep-id",
        ]
        gpus = ["--device=nvidia.com/gpu=all"] if self.cuda else []
        shared = [*(f"--volume={volume}" for volume in self.volumes), "--volume=/tmp:/tmp"]
        return [*podman, "--ulimit=host", "--env-host", *gpus, *shared, self.container]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the ranks: the fabric, and Horovod's buffer and cycle, scaled like bytes and time."""
        values = {
            "HOROVOD_FUSION_THRESHOLD": str(int(self.settings.fusion_mb * (1 << 20) / self.scale)),
            "HOROVOD_CYCLE_TIME": f"{self.settings.cycle_ms * self.slowdown:g}",
            "HOROVOD_GLOO_IFACE": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            # The worker replaces the names by those of its own node.
            fabric.VARIABLE: f"{self.transport} {self.subnet}",
        }
        if not self.words:
            values["OMP_NUM_THREADS"] = "1"
        if self.timeline:
            values |= {"HOROVOD_TIMELINE": self.timeline, "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
        if self.cuda:
            # A trial proves from this output which interface and algorithm NCCL used.
            values |= {} if self.words else {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": nccl_log.SUBSYSTEMS}
            # Without =, eth1 would also match eth10.
            values["NCCL_SOCKET_IFNAME"] = f"={self.interface}"
            values |= fabric_settings.nccl(self.transport, self.settings)
        return values


def mpirun(launch: Launch) -> list[str]:
    """mpirun with the reference architecture's flags."""
    values = launch.environment
    if not launch.engine.startswith("horovod"):
        values |= {"MASTER_ADDR": launch.hosts[0], "MASTER_PORT": str(MASTER_PORT)}
    # On GPUs NCCL sends the gradients. MPI's messages are then small, and its own choice of algorithms is best.
    settings = launch.settings.model_copy(update={"algorithm": "default"}) if launch.cuda else launch.settings
    pinned = launch.program in ("trials", "learn") and not launch.cuda
    parameters = fabric_settings.mca(launch.transport, launch.subnet, launch.cuda)
    parameters |= tuning.launch_mca(settings, launch.processes, pinned)
    return [
        *("mpirun", "-np", str(launch.processes), "-H", launch.host_list, "-bind-to", "none", "-map-by", "slot"),
        *(word for name, value in parameters.items() for word in ("-mca", name, value)),
        *exports(values),
        *launch.command,
    ]


def exports(values: dict[str, str]) -> list[str]:
    """mpirun passes only the variables that -x names."""
    return [word for name, value in values.items() for word in ("-x", f"{name}={value}")]


def horovodrun(launch: Launch) -> list[str]:
    values = [f"{name}={value}" for name, value in launch.environment.items()]
    start = ["env", *values, HOROVODRUN, "--gloo", "-np", str(launch.processes), "-H", launch.host_list]
    return [*start, "--network-interfaces", launch.interface, *launch.command]


def srun(launch: Launch) -> list[str]:
    """Gloo without horovodrun, which starts ranks by SSH: outside the job, and so outside Slurm's control."""
    values = [f"{name}={value}" for name, value in launch.environment.items()]
    return [
        *("srun", f"--ntasks={launch.processes}", f"--ntasks-per-node={launch.slots}", "--overcommit"),
        *("--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1"),
        *("env", *values, PYTHON, worker_files.folder(), "slurm_rank", *launch.command),
    ]


def salloc(launch: Launch) -> list[str]:
    """The launch inside an allocation: whole nodes, so that nobody else disturbs a measurement."""
    gpus = [f"--gpus-per-node={launch.slots}"] if launch.cuda else []
    return [
        *("salloc", f"--job-name=bench-{launch.run}", f"--nodes={len(launch.hosts)}"),
        *(f"--nodelist={','.join(launch.hosts)}", f"--ntasks-per-node={launch.slots}"),
        *("--exclusive", "--overcommit", "--no-bell", *gpus, *argv(replace(launch, slurm=True))),
    ]


def torchrun(launch: Launch) -> list[str]:
    """One torchrun per node, started by mpirun: torchrun starts processes on its own node only."""
    elastic = [
        *("--nnodes", str(len(launch.hosts)), "--nproc-per-node", str(launch.slots), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{launch.hosts[0]}:{MASTER_PORT}", "--rdzv-id", launch.run),
    ]
    hosts = ",".join(f"{host}:1" for host in launch.hosts)
    return [
        *("mpirun", "-np", str(len(launch.hosts)), "-H", hosts, "-bind-to", "none"),
        *("-mca", "oob_tcp_if_include", launch.subnet, *exports(launch.environment)),
        *(*launch.container_command, TORCHRUN, *elastic),
        *(("--no-python", *launch.words) if launch.words else launch.worker_words),
    ]


ON_TORCH = ("ddp", "ps", "ps-async", "easgd", "local-sgd", "hogwild", "fsdp", "pipeline", "tensor", "spatial")
LAUNCHERS = {"horovod-mpi": mpirun, "horovod-gloo": horovodrun, **dict.fromkeys(ON_TORCH, mpirun)}


def argv(launch: Launch) -> list[str]:
    if launch.torchrun:
        return torchrun(launch)
    # On one node horovodrun fails: it looks for an interface with the address 127.0.0.1. No bytes leave the node.
    if len(launch.hosts) == 1:
        return mpirun(launch)
    return srun(launch) if launch.slurm and launch.engine == "horovod-gloo" else LAUNCHERS[launch.engine](launch)
