"""How the worker is started on the head: one function per launcher, each only builds a command list."""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = "/opt/horovod/bin/python"
FUSION_BYTES = 128 << 20
CYCLE_MS = 5.0


@dataclass(frozen=True)
class Job:
    """What every launcher needs to know."""

    run: str
    engine: str
    hosts: tuple[str, ...]
    slots: int
    subnet: str
    interface: str
    worker: str
    spec: str
    scale: float = 1.0
    cuda: bool = False
    timeline: str | None = None

    @property
    def host_list(self) -> str:
        return ",".join(f"{host}:{self.slots}" for host in self.hosts)

    @property
    def processes(self) -> int:
        return len(self.hosts) * self.slots

    @property
    def command(self) -> list[str]:
        return [PYTHON, self.worker, "--engine", self.engine, "--spec", self.spec, "--run", self.run]

    @property
    def environment(self) -> dict[str, str]:
        """What the worker's processes get: the fabric by name, and Horovod's buffer scaled with the gradients."""
        values = {
            "HOROVOD_FUSION_THRESHOLD": str(int(FUSION_BYTES / self.scale)),
            "HOROVOD_CYCLE_TIME": f"{CYCLE_MS:g}",
            "HOROVOD_GLOO_IFACE": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMP_NUM_THREADS": "1",
        }
        if self.timeline:
            values |= {"HOROVOD_TIMELINE": self.timeline, "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
        if self.cuda:
            values |= {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": self.interface}
        return values


def collective(hosts: int) -> list[str]:
    """The all-reduce OpenMPI is told to use. Ring keeps every link busy both ways; with two nodes it would wait on
    itself, and recursive doubling sends the same bytes in one exchange."""
    algorithm = "4" if hosts > 2 else "3"
    return ["-mca", "coll_tuned_use_dynamic_rules", "1", "-mca", "coll_tuned_allreduce_algorithm", algorithm]


def mpirun(job: Job) -> list[str]:
    """mpirun with the reference architecture's flags."""
    exports = [word for name, value in job.environment.items() for word in ("-x", f"{name}={value}")]
    if job.engine == "ddp":
        exports += ["-x", f"MASTER_ADDR={job.hosts[0]}", "-x", "MASTER_PORT=29500"]
    return [
        *("mpirun", "-np", str(job.processes), "-H", job.host_list, "-bind-to", "none", "-map-by", "slot"),
        *("-mca", "btl_tcp_if_include", job.subnet, "-mca", "oob_tcp_if_include", job.subnet),
        *collective(len(job.hosts)),
        *exports,
        *job.command,
    ]


def horovodrun(job: Job) -> list[str]:
    exports = [f"{name}={value}" for name, value in job.environment.items()]
    return [
        *("env", *exports, "/opt/horovod/bin/horovodrun", "--gloo", "-np", str(job.processes), "-H", job.host_list),
        *("--network-interfaces", job.interface),
        *job.command,
    ]


LAUNCHERS = {"horovod-mpi": mpirun, "horovod-gloo": horovodrun, "ddp": mpirun}


def argv(job: Job) -> list[str]:
    return LAUNCHERS[job.engine](job)
