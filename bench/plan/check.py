"""Check a plan against a cluster: what the schema alone cannot check."""

from __future__ import annotations

import re

from bench.catalogue import gpu_rates, models
from bench.plan import asynchronous, split_engines
from bench.plan.schema import Plan
from cluster.core.config import MAX_NODES
from cluster.core.contract import Contract
from cluster.core.errors import UserError

PRECISIONS = ("fp32", "tf32", "amp")
# Names of GPUs older than Ampere, such as v100, t4 or 1080ti. The worker refuses those that no name gives away.
NO_TF32 = re.compile(r"^(tesla[ -]?)?[kmpvt]\d|(10|16|20)[5-8]0", re.IGNORECASE)


def check(plan: Plan, cluster: Contract | None, available: int) -> None:
    """Raise UserError if the cluster cannot run the plan or a name in it is unknown."""
    if cluster:
        if shadowed := [name for name in plan.links if name in cluster.fabrics]:
            raise UserError(f"plan.links.{shadowed[0]}: the cluster has a fabric of this name; choose another name")
        known = [*cluster.fabrics, *plan.links]
        for fabric in plan.fabrics:
            if fabric not in known:
                raise UserError(f"plan.fabrics: unknown fabric {fabric!r}; choose from {', '.join(known)}")
        efa = [name for name in plan.fabrics if name in cluster.fabrics and cluster.fabrics[name].transport == "efa"]
        if efa:
            check_efa(plan, efa[0])
        shaped = cluster.fabrics[cluster.active_fabric].shaped
        for name in ("slowdown", "links"):
            if getattr(plan, name) and not shaped:
                raise UserError(f"plan.{name}: the cluster's fabrics are not shaped and keep their own rate; remove it")
        if plan.container and shaped:
            fix = "remove it, or set shaped: false on the fabrics of cluster.yml and use device cpu or cuda"
            raise UserError(f"plan.container: a container cannot set the rate of a shaped fabric; {fix}")
    if (most := max(plan.nodes)) > available:
        more = f"run `make scale NODES={most}` or list fewer"
        fix = more if most <= MAX_NODES else f"a cluster has at most {MAX_NODES}; list fewer"
        raise UserError(f"plan.nodes: {most} nodes requested, the cluster has {available}; {fix}")
    if "1bit" in plan.compressions and "ps" in plan.engines:
        raise UserError("plan.compressions: engine ps does not support 1bit; remove one of them")
    asynchronous.check(plan)
    split_engines.check(plan)
    if plan.launcher == "torchrun" and set(plan.engines) != {"ddp"}:
        raise UserError("plan.launcher: torchrun starts engine ddp only; set engines: [ddp]")
    for model in plan.models:
        check_file(plan, model)
        if models.get(model).tokens and plan.data != ["synthetic"]:
            raise UserError(f"plan.data: {model} reads words, the data sets hold images; write synthetic")
    if plan.data_loader == "dali" and plan.device != "cuda":
        raise UserError(f"plan.data_loader: dali needs device cuda, not {plan.device}; remove it")
    kind, _, profile = plan.device.partition(":")
    if plan.interconnect != "auto" and kind != "emulated":
        raise UserError(f"plan.interconnect: device {plan.device} has its own links between GPUs; remove it")
    if isinstance(plan.compute_ms, dict) and (unknown := plan.compute_ms.keys() - {*models.NAMES, *plan.models}):
        names = ", ".join(models.NAMES)
        raise UserError(f"plan.compute_ms: unknown model {sorted(unknown)[0]!r}; choose from {names}")
    if plan.channels_last and kind != "cuda":
        raise UserError(f"plan.channels_last: needs device cuda, not {plan.device}; remove it")
    if plan.precision and kind == "cpu":
        raise UserError("plan.precision: device cpu always computes in fp32; remove it")
    if plan.slowdown and (kind != "emulated" or plan.data != ["synthetic"]):
        raise UserError("plan.slowdown: only emulated devices with synthetic data can be slowed; remove it")
    if kind == "emulated":
        gpu_rates.get(profile)
        if plan.precision and plan.compute_ms is None:
            gpu_rates.compute_ms(profile, plan.models[0], plan.batches[0], plan.precision)
    elif plan.device == "cuda":
        gpus, most = cluster.gpus_per_node if cluster else 0, max(plan.gpus_per_node)
        if gpus < most:
            need = f"cuda needs {most} GPUs per node, the cluster has {gpus}"
            raise UserError(f"plan.device: {need}; use emulated:<profile> or cpu")
        if plan.precision not in (None, *PRECISIONS):
            choices = ", ".join(PRECISIONS)
            raise UserError(f"plan.precision: unknown precision {plan.precision!r}; choose from {choices}")
        if cluster and plan.precision == "tf32":
            for name in cluster.compute:
                if NO_TF32.search(gpu := cluster.nodes[name].gpu_model):
                    raise UserError(
                        f"plan.precision: tf32 needs GPUs from Ampere on, {name} has {gpu}; use fp32 or amp"
                    )
        if "ps" in plan.engines:
            raise UserError("plan.engines: ps does not run on GPUs; remove it, or use emulated:<profile> or cpu")
        if "1bit" in plan.compressions:
            raise UserError("plan.compressions: 1bit does not run on GPUs; remove it, or use emulated:<profile> or cpu")
    elif plan.device != "cpu":
        raise UserError(f"plan.device: unknown device {plan.device!r}; choose cuda, cpu or emulated:<profile>")


def check_file(plan: Plan, model: str) -> None:
    """A model of the user is a table of sizes, so only an emulated device can run it, in a measured time."""
    if not models.is_file(model):
        return
    if "/" in model:
        raise UserError(f"plan.models: {model}: name a file in the working folder, without its folder")
    if not plan.device.startswith("emulated:"):
        raise UserError(f"plan.models: {model} lists sizes only; set device: emulated:<profile>")
    if plan.compute_ms is None or (isinstance(plan.compute_ms, dict) and model not in plan.compute_ms):
        raise UserError(f"plan.compute_ms: {model} has no published rate; measure one GPU and write {{{model}: 150}}")


def check_efa(plan: Plan, fabric: str) -> None:
    """EFA has no sockets: only NCCL's plugin and OpenMPI's libfabric send over it."""
    sockets = {"horovod-gloo", "ps"} if plan.device == "cuda" else {"horovod-gloo", "ddp", "ps", *asynchronous.ENGINES}
    sockets |= set(split_engines.ENGINES)
    if wrong := [engine for engine in plan.engines if engine in sockets]:
        fix = "use horovod" if plan.device != "cuda" else "use horovod or ddp"
        raise UserError(f"plan.engines: {wrong[0]} sends over sockets, which {fabric} with transport efa lacks; {fix}")
    if plan.container:
        raise UserError(f"plan.container: {fabric} has transport efa, which containers do not get; remove it")
