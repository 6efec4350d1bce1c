"""Every published scaling measurement in one schema, whichever table it is in.

A series is a curve: everything is equal but the number of GPUs. A group is a laboratory (laboratories.csv): its rows
share machines and habits, so they are judged together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from bench.catalogue.gpu_rates import published
from cluster.core.errors import UserError

Row = dict[str, str]
# Cray Aries brings about 10 GB/s into a node (from memory, not looked up).
PIZ_DAINT_GBPS = 80.0
OVERLAPS = {"bsp": "none", "wfbp": "tensor", "mgwfbp": "fused"}
TRANSPORTS = {"rdma": "verbs", "intelmpi": "verbs"}
# GPU, precision and engine of the rows of scaling-2017.csv, which has no columns for them. Issue 779 must have sent
# half precision: 192 MB per node and step take 64 ms at 25 Gbit/s, for which its 80 ms with 16 GPUs leave no room.
SCALING_2017 = {
    "issue779": ("v100", "fp16", "horovod"),
    "dlperf-ddp": ("v100", "fp32", "ddp"),
    "dlperf-mxnet-amp": ("v100", "amp", "horovod"),
}


@dataclass(frozen=True)
class Measurement:
    """One published row. `single` is the rate of one GPU in the same setting."""

    laboratory: str
    table: str
    source: str
    model: str
    gpu: str
    precision: str
    batch: int
    gpus: int
    gpus_per_node: int
    rate_gbps: float | None
    # None: not stated, as for most rows inside one node.
    transport: str | None
    engine: str
    overlap: str
    collective: str
    seq_len: int | None
    grad_accum: int
    single: float
    images_per_second: float
    note: str

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def outlier(self) -> bool:
        """The source itself says that the row is one, or a curve of its table falls and rises again."""
        if "16-GPU resnet152 points are outliers" in self.note:
            return self.model == "resnet152" and self.gpus == 16
        return (self.table, self.gpu, self.model, self.transport, self.gpus) in OUTLIERS

    @property
    def series(self) -> tuple[object, ...]:
        per_node = self.gpus_per_node if self.nodes > 1 else None
        network = (self.rate_gbps, self.transport, per_node)
        how = (self.engine, self.overlap, self.collective, self.seq_len, self.note if self.engine == "ps" else "")
        # The rows of NVIDIA's BERT keep the global batch, so accumulation differs along a curve.
        return (self.laboratory, self.model, self.gpu, self.precision, self.batch, self.single, *network, *how)


# 387 images/s on 16 K80 between 124 on 8 and 339 on 32.
OUTLIERS = {("more.csv", "k80", "resnet101", "tcp", 16)}


@cache
def laboratory(source: str) -> str:
    matches = [row for row in published("laboratories") if source.startswith(row["source"])]
    if not matches:
        raise UserError(f"bench/catalogue/published/laboratories.csv: no laboratory for {source!r}; add its prefix")
    return max(matches, key=lambda row: len(row["source"]))["laboratory"]


@cache
def every() -> tuple[Measurement, ...]:
    """All rows with several GPUs and a rate; rows of one GPU are their `single`."""
    found = [*_more(), *_scaling_2017(), *_batchai_more(), *_curves(), *_lowbandwidth(), *_tf_benchmarks()]
    return tuple(row for row in found if row.gpus > 1)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _collective(raw_engine: str) -> str:
    return "mpi" if "mpi" in raw_engine else "nccl"


def _more() -> Iterator[Measurement]:
    for row in published("more"):
        raw = row["raw_engine"]
        yield Measurement(
            laboratory=laboratory(row["source"]),
            table="more.csv",
            source=row["source"],
            model=row["model"],
            gpu=row["gpu"].strip(),
            precision="fp16" if row["source"].endswith("issue 779") else row["precision"],
            batch=int(row["batch"]),
            gpus=int(row["gpus"]),
            gpus_per_node=int(row["gpus_per_node"]),
            rate_gbps=PIZ_DAINT_GBPS if "Piz Daint" in row["note"] else _number(row["rate_gbps"]),
            transport=TRANSPORTS.get(row["transport"], row["transport"]) or _implied(raw, row["note"]),
            engine=row["engine"],
            overlap=row["overlap"],
            collective=_collective(raw),
            seq_len=int(row["seq_len"]) if row["seq_len"] else None,
            grad_accum=int(row["grad_accum"] or 1),
            single=float(row["single"]),
            images_per_second=float(row["images_per_second"]),
            note=f"{raw}; {row['note']}",
        )


def _implied(raw_engine: str, note: str) -> str | None:
    """Intel MPI ran over InfiniBand. TensorFlow's servers speak gRPC, which is TCP on any network."""
    if "intel mpi" in raw_engine:
        return "verbs"
    return "tcp" if "Piz Daint" in note else None


def _row(table: str, row: Row, set_name: str, single: float, **own: object) -> Measurement:
    """A row of the older tables, which have fewer columns."""
    facts: dict[str, object] = {
        "laboratory": laboratory(f"{table} {set_name}"),
        "table": table,
        "source": f"{table} {set_name}".strip(),
        "model": row["model"],
        "gpu": row.get("gpu", "v100"),
        "precision": row.get("precision", "fp32"),
        "batch": int(row["batch"]),
        "gpus": int(row["gpus"]) if "gpus" in row else 0,
        "gpus_per_node": int(row["gpus_per_node"]) if "gpus_per_node" in row else 0,
        "rate_gbps": _number(row.get("rate_gbps", "")),
        "transport": TRANSPORTS.get(row.get("transport", "tcp"), row.get("transport", "tcp")),
        "engine": "horovod",
        "overlap": OVERLAPS[row.get("method", "mgwfbp")],
        "collective": "mpi" if row.get("transport") == "intelmpi" else "nccl",
        "seq_len": None,
        "grad_accum": 1,
        "single": single,
        "images_per_second": float(row.get("images_per_second") or 0),
        "note": row.get("framework", ""),
    }
    return Measurement(**(facts | own))  # type: ignore[arg-type]


def _scaling_2017() -> Iterator[Measurement]:
    for row in published("scaling-2017"):
        gpu, precision, engine = SCALING_2017.get(row["set"], ("p100", "fp32", "horovod"))
        own = {"gpu": gpu, "precision": precision, "engine": engine}
        yield _row("scaling-2017.csv", row, row["set"], float(row["single"]), **own)


def _batchai_more() -> Iterator[Measurement]:
    rows = published("batchai-more")
    single = {(row["gpu"], row["model"]): float(row["images_per_second"]) for row in rows if row["gpus"] == "1"}
    for row in rows:
        yield _row("batchai-more.csv", row, "", single[row["gpu"], row["model"]])


def _curves() -> Iterator[Measurement]:
    """hkbu-2020, dlperf and batchai: the fabric names the rate, and one row with one GPU is the base."""
    rates = {"10gbe": 10.0, "100gbe": 100.0, "ib100": 100.0}
    base = ("gpu", "framework", "precision", "model", "batch")
    gpus = {"hkbu-2020": "v100-pcie", "dlperf": "v100"}
    for name in ("hkbu-2020", "dlperf", "batchai"):
        rows = published(name)
        alone = {tuple(row.get(key, "") for key in base): row for row in rows if row["gpus"] == "1"}
        for row in rows:
            single = float(alone[tuple(row.get(key, "") for key in base)]["images_per_second"])
            own = {"rate_gbps": rates.get(row["fabric"]), "gpu": row.get("gpu") or gpus[name]}
            yield _row(f"{name}.csv", row, "", single, **own)


def _lowbandwidth() -> Iterator[Measurement]:
    rows = published("lowbandwidth")
    step = next(float(row["step_ms"]) for row in rows if row["nodes"] == "1")
    for row in rows:
        gpus = int(row["nodes"]) * int(row["gpus_per_node"])
        rate = 1000 * int(row["batch"]) / float(row["step_ms"])
        own = {"gpus": gpus, "images_per_second": gpus * rate}
        yield _row("lowbandwidth.csv", row, "", 1000 * int(row["batch"]) / step, **own)


def _tf_benchmarks() -> Iterator[Measurement]:
    """Rows with real data are left out where the input is the limit: this is no measurement of scaling."""
    rows = [row for row in published("tf-benchmarks") if row["data"] == "synthetic"]
    base = ("system", "model", "batch")
    single = {tuple(row[key] for key in base): float(row["images_per_second"]) for row in rows if row["gpus"] == "1"}
    for row in rows:
        servers = row["system"].startswith("ec2")
        own: dict[str, object] = {
            "gpu": "k80" if servers else "p100",
            "gpus_per_node": 8,
            "engine": "ps" if servers else "horovod",
            "transport": "tcp",
            "note": "tensorflow parameter servers" if servers else "",
        }
        yield _row("tf-benchmarks.csv", row, "", single[tuple(row[key] for key in base)], **own)
