"""The engines that split the network instead of the data, their settings, and the combinations that cannot work."""

from __future__ import annotations

from collections.abc import Sequence

from bench.catalogue import gpu_rates, models, units
from bench.plan import programs, stages, unfold
from bench.plan.schema import Plan
from bench.plan.stages import Stage
from bench.results.trial import Point
from bench.worker.protocol import SplitSpec
from cluster.core.errors import UserError

ENGINES = ("fsdp", "pipeline", "tensor", "spatial")
# Height of the image at the start of a network over that at its end: a tile must have a row there.
SHRINKS = 32
# Bytes of a number on the wire.
EACH = 4


def check_tensor(model: str, ranks: int, field: str) -> None:
    size = units.size_of(models.get(model))
    if size is not None:
        if size.heads % ranks:
            raise UserError(f"{field}: tensor splits the {size.heads} heads of {model}, which {ranks} does not divide")
    elif not programs.large_linears(units.of(model)):
        able = "transformers, vgg16 and alexnet"
        raise UserError(f"{field}: tensor splits large linear layers, which {model} has not; use it for {able}")


def check_spatial(model: str, ranks: int, field: str) -> None:
    network = models.get(model)
    if units.size_of(network) is not None:
        raise UserError(f"{field}: spatial splits images into tiles, {model} has no convolutions over them")
    if any(".squeeze" in layer.name for layer in network.layers):
        raise UserError(
            f"{field}: spatial splits images into tiles, {model} needs means of whole images in every block"
        )
    if ranks > (most := network.input_pixels // SHRINKS):
        raise UserError(f"{field}: spatial needs a row of the last image per tile, {model} has {most}, not {ranks}")


def check(plan: Plan) -> None:
    engines: list[str] = [engine for engine in plan.engines if engine in ENGINES]
    for name in ("stages", "micro_batches", "schedule"):
        if getattr(plan, name) is not None and "pipeline" not in engines:
            raise UserError(f"plan.{name}: only engine pipeline has it; remove it")
    if not engines:
        return
    first = engines[0]
    if other := [name for name in plan.compressions if name != "none"]:
        raise UserError(f"plan.compressions: engine {first} does not support {other[0]}; write none")
    if plan.gpus_per_node != [1]:
        raise UserError(f"plan.gpus_per_node: engine {first} has one rank per node; write 1")
    if plan.device == "cuda":
        raise UserError(f"plan.engines: {first} does not run on GPUs; remove it, or use emulated:<profile> or cpu")
    if plan.data != ["synthetic"]:
        raise UserError(f"plan.data: engine {first} reads no shards; write synthetic")
    for model in plan.models:
        if plan.stages:
            stages.check_stages(model, plan.stages, "plan.stages")
        for count in plan.nodes:
            check_model(plan, model, count, engines)
    if plan.stages and plan.stages > (most := max(plan.nodes)):
        raise UserError(f"plan.stages: {plan.stages} stages need as many nodes, plan.nodes has {most} at most")


def check_model(plan: Plan, model: str, nodes: int, engines: list[str]) -> None:
    if "tensor" in engines:
        check_tensor(model, nodes, "plan.engines")
    if "spatial" in engines:
        check_spatial(model, nodes, "plan.engines")
    if "pipeline" not in engines:
        return
    deep = depth(plan, nodes)
    if nodes % deep:
        raise UserError(f"plan.stages: {deep} stages do not divide {nodes} nodes; list other nodes or stages")
    stages.check_stages(model, deep, "plan.stages" if plan.stages else "plan.nodes")
    if plan.device == "cpu" and units.tied(model):
        raise UserError(f"plan.models: the two ends of {model} share weights, which pipeline on device cpu cannot")
    if plan.micro_batches and plan.micro_batches < deep:
        raise UserError(f"plan.micro_batches: {plan.micro_batches} leave stages without work; write {deep} or more")
    for batch in plan.batches:
        samples = batch * deep if plan.scaling == "weak" else max(1, round(batch / nodes)) * deep
        if plan.micro_batches and samples % plan.micro_batches:
            raise UserError(
                f"plan.micro_batches: {plan.micro_batches} does not divide the {samples} samples of a pipeline's step"
            )


def depth(plan: Plan, ranks: int) -> int:
    return min(plan.stages or ranks, ranks)


def spec(plan: Plan, point: Point) -> SplitSpec | None:
    """None for engines that split the data."""
    return _build(plan, point) if point.engine in ENGINES else None


def _build(plan: Plan, point: Point) -> SplitSpec:
    parts, ranks = units.of(point.model), point.gpus
    everybody = [list(range(ranks))]
    emulated = point.device.startswith("emulated:")
    compute = unfold.compute_ms(plan, point)[0] if emulated else 1.0
    work = programs.Work(parts, compute, point.batch * ranks)
    if point.engine == "pipeline":
        return _pipeline(plan, point, compute, emulated)
    if point.engine == "fsdp":
        found = programs.fsdp(work, ranks)
    elif point.engine == "tensor":
        found = programs.tensor(work, ranks, units.size_of(models.get(point.model)))
    else:
        found = programs.spatial(work, ranks)
    return SplitSpec(groups=everybody, programs=found)


def _pipeline(plan: Plan, point: Point, compute: float, emulated: bool) -> SplitSpec:
    deep, samples = depth(plan, point.gpus), point.batch * depth(plan, point.gpus)
    pieces = plan.micro_batches or stages.micro_batches(deep, samples)
    piece, schedule = samples // pieces, plan.schedule or "1f1b"
    micro = micro_ms(plan, point, piece, compute)
    cut = cut_of(point, deep, pieces, piece, schedule, micro if emulated else None)
    found, groups = programs.pipeline(cut, point.gpus, pieces, micro, piece, schedule)
    return SplitSpec([stage.first for stage in cut], pieces, schedule, groups, found)


def cut_of(point: Point, deep: int, pieces: int, piece: int, schedule: str, micro: float | None) -> tuple[Stage, ...]:
    """As bench plan placement cuts. Without a time of one micro-batch, as on device cpu, by arithmetic alone."""
    if micro is None:
        return stages.cut(point.model, deep)
    send_ms = EACH * 8 / point.rate_gbps / 1e6

    def step_ms(cut: Sequence[Stage]) -> float:
        edges = [part.sends * piece * send_ms for part in cut[:-1]]
        return stages.pipeline_ms([part.share * micro for part in cut], edges, schedule, pieces)

    return stages.fastest_cut(point.model, deep, None, step_ms)


def micro_ms(plan: Plan, point: Point, samples: int, compute: float) -> float:
    """The whole network on one micro-batch: small ones are slower per sample."""
    fixed = gpu_rates.HALF_BATCH
    if plan.compute_ms is None and point.device.startswith("emulated:"):
        return gpu_rates.compute_ms(point.device.partition(":")[2], point.model, samples, plan.precision)[0]
    return compute * (samples + fixed) / (point.batch + fixed)


def settings(plan: Plan, point: Point) -> dict[str, int | str]:
    """What a trial of a pipeline records."""
    if point.engine != "pipeline":
        return {}
    found = _build(plan, point)
    return {"stages": len(found.stages), "micro_batches": found.micro_batches, "schedule": found.schedule}


def _trained_values(point: Point) -> float | None:
    """Numbers that all ranks put together, where torch over Gloo sends others than an emulated rank."""
    network = models.get(point.model)
    if point.engine == "fsdp":
        # It gathers the last unit again too, and Gloo scatters a sum by adding it up on all ranks.
        return 4 * network.parameters
    size = units.size_of(network)
    if point.engine == "tensor" and size is not None:
        # The ends of the network are not split. BERT's query, key and value each have a sum in backward.
        sums = (6 if point.model.startswith("bert") else 4) * size.blocks
        return 2 * sums * units.of(point.model)[1].inputs * point.batch * point.gpus
    return None


def node_bytes(plan: Plan, point: Point) -> float | None:
    """Bytes that a node must send per step at scale 1, mean over nodes; None for engines that split the data."""
    if point.device == "cpu" and (known := _trained_values(point)) is not None:
        return EACH * known * (point.gpus - 1) / point.gpus
    found = spec(plan, point)
    return EACH * programs.sent(found.programs, found.groups) / point.nodes if found else None
