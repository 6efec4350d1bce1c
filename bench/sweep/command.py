"""Run a plan: every combination of nodes, fabrics and batches, measured on the cluster."""

from __future__ import annotations

import argparse
import base64
import json
import platform
import queue
import subprocess
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from bench.catalogue import models
from bench.plan import check, scale_model, schema, unfold
from bench.plan.schema import Plan
from bench.plan.unfold import PointGroup
from bench.report import command as report
from bench.results import store
from bench.results.trial import Point, Trial
from bench.sweep import executors, launch, monitoring, nccl_log, nodes, record
from bench.sweep.progress import Progress, console
from cluster import lifecycle, tuning
from cluster.core import config, worker_files
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent
from cluster.core.state import State
from cluster.terraform import read_output
from cluster.tuning import Tuning

# Without a word from the worker for this long, we ask the nodes who is still there.
SILENCE = 25.0
START_LIMIT = 90.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to run on (default local)")
    parser.add_argument("--plan", default="quick", help=f"{', '.join(schema.names())}, or a file of your own")
    parser.add_argument("--run", help="name of the results folder (default: the plan's name); a rerun completes it")
    parser.add_argument("--fresh", action="store_true", help="measure again what is already there, into a new folder")
    parser.add_argument("--dry-run", action="store_true", help="list the trials with estimated time; run nothing")
    parser.add_argument("--no-check", action="store_true", help="skip the convergence check at 2s")
    parser.add_argument("--timeline", action="store_true", help="also capture Horovod's timeline of the last point")
    parser.add_argument("--json", action="store_true", help="print the trials as JSON at the end")


def run(args: argparse.Namespace) -> int:
    wanted = schema.load(args.plan)
    state = State(args.env)
    cluster = config.load(args.env)
    if args.dry_run:
        contract = read_output(state) if state.tfstate.exists() else None
        available = executors.size(contract, cluster) if contract else max(*wanted.nodes, cluster.nodes)
        check.check(wanted, contract, available, cluster.gpus_per_node)
        return dry_run(wanted, contract, tuning.load(args.env), args.json)
    if not state.tfstate.exists():
        check.check(wanted, None, max(wanted.nodes), cluster.gpus_per_node)
        console.print(f"nothing is deployed: deploying {max(cluster.nodes, *wanted.nodes)} nodes first", markup=False)
        lifecycle.deploy(args.env, max(cluster.nodes, *wanted.nodes), False)
    contract = read_output(state)
    check.check(wanted, contract, executors.size(contract, cluster), cluster.gpus_per_node)
    executor = executors.make(contract, args.env)
    contract = executor.contract
    if args.timeline and isinstance(executor, executors.Jobs):
        raise UserError("--timeline: only nodes can be asked for it; leave it out on GPULab")
    name = args.run or Path(args.plan).stem + executor.suffix
    if args.fresh:
        name += datetime.now(UTC).strftime("-%Y%m%d-%H%M%S")
    folder = store.RunFolder(store.RESULTS / args.env / name)
    folder.prepare(wanted.model_dump(), provenance(args.env, contract))
    tuned = tuning.load(args.env)
    sweep = Sweep(contract, wanted, folder, executor, tuned, goodput_share(state), check=not args.no_check)
    before, begin = len(folder.trials()), time.monotonic()
    spent = sweep.run()
    if cluster.features.monitoring and isinstance(executor, executors.Nodes) and len(folder.trials()) > before:
        monitoring.keep(contract, folder, begin, time.monotonic())
    if args.timeline:
        sweep.capture_timeline()
    ids = [point.id for one in sweep.launches for point in one.points]
    latest = {trial.id: trial for trial in folder.trials()}
    trials = [latest[identifier] for identifier in ids if identifier in latest]
    if args.json:
        print(json.dumps([trial.model_dump() for trial in trials], indent=1))
    else:
        show(trials, wanted, spent, folder)
        report.run(argparse.Namespace(run=str(folder.folder), out=None, plots=None, json=False))
    return 0 if all(trial.status == "ok" for trial in trials) else 1


def dry_run(wanted: Plan, contract: Contract | None, tuned: dict[str, Tuning], as_json: bool) -> int:
    launches = list(unfold.points(wanted, contract, tuned))
    seconds = unfold.estimate(wanted, launches)
    total = sum(seconds.values())
    rows = [
        {**point.model_dump(), "estimated_seconds": round(seconds[point.id], 1)}
        for one in launches
        for point in one.points
    ]
    if as_json:
        print(json.dumps({"trials": rows, "estimated_seconds": round(total)}, indent=1))
        return 0
    table = Table()
    columns = ("engine", "fabric", "nodes", "model", "batch", "compression", "estimated_seconds")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
    console.print(f"{len(rows)} trials, about {total / 60:.1f} minutes", markup=False)
    return 0


def provenance(env: str, contract: Contract) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", config.ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "env": env,
        "git_commit": commit,
        "versions": config.versions(),
        "kernel": platform.release(),
        "nodes": {name: node.model_dump() for name, node in contract.ordered()},
        "fabrics": {name: fabric.model_dump() for name, fabric in contract.fabrics.items()},
        "cluster": yaml.safe_load(config.cluster_file(env).read_text())["cluster"],
        "worker": worker_files.archive()[0],
    }


def goodput_share(state: State) -> float | None:
    """Payload over rate of the slowest link of the ring, as the last deploy measured it."""
    try:
        found = json.loads(state.validation.read_text())
        return float(min(row["gbps"] for row in found["ring"]) / found["rate_gbps"])
    except (OSError, ValueError, KeyError):
        return None


class Sweep:
    """One run of a plan on a cluster."""

    def __init__(
        self,
        contract: Contract,
        wanted: Plan,
        folder: store.RunFolder,
        executor: executors.Executor,
        tuned: dict[str, Tuning],
        link_share: float | None,
        check: bool,
    ) -> None:
        self.contract, self.plan, self.folder, self.check = contract, wanted, folder, check
        self.executor, self.tuned, self.link_share = executor, tuned, link_share
        self.launches = list(unfold.points(wanted, contract, tuned))
        self.names = [name for name, _ in contract.ordered()]
        self.spent = {"launch": 0.0, "warm-up": 0.0, "measure": 0.0}
        self.shaped = contract.fabrics[contract.active_fabric].shaped
        self.lost: set[str] = set()
        self.timeline = False

    def run(self) -> dict[str, float]:
        done = self.folder.done()
        work = unfold.estimate(self.plan, self.launches)
        there = done & work.keys()
        if there:
            console.print(f"{len(there)} of {len(work)} trials are already there", markup=False)
        begin = time.monotonic()
        self.lost = set(self.executor.silent(self.names))
        present = [name for name in self.names if name not in self.lost]
        worker = self.executor.install(present)
        try:
            with Progress(work, there) as self.progress:
                for one in self.launches:
                    left = tuple(point for point in one.points if point.id not in done)
                    if left:
                        self.one_launch(replace(one, points=left), worker)
        finally:
            self.executor.restore(present)
        self.spent["other"] = time.monotonic() - begin - sum(self.spent.values())
        return self.spent

    def one_launch(self, one: PointGroup, worker: str) -> None:
        hosts = self.names[: one.nodes]
        gone = [host for host in hosts if host in self.lost]
        started = datetime.now(UTC).isoformat(timespec="seconds")
        if gone:
            for point in one.points:
                self.keep(record.failure(point, f"node {gone[0]} does not answer", gone[0], started, None))
            return
        job = self.job(one, worker)
        log = f"logs/{one.engine}-{one.fabric}-{one.nodes}-{job.run}.log"
        self.progress.doing(f"{one.engine} {one.fabric} {one.nodes} nodes", "starting")
        Attempt(self, one, job, worker, job.interface, log, started).run()

    def job(self, one: PointGroup, worker: str) -> launch.Launch:
        factor, slowed = self.factors(one)
        fabric = self.contract.fabrics.get(one.fabric) or self.contract.fabrics[self.contract.active_fabric]
        return launch.Launch(
            run=f"{int(time.time() * 1000):x}",
            engine=one.engine,
            hosts=tuple(self.names[: one.nodes]),
            slots=one.points[0].gpus_per_node,
            subnet=fabric.subnet,
            interface=fabric.interface,
            worker=f"{worker}/main.py",
            spec=self.spec(one, factor, slowed),
            settings=unfold.tuning_of(self.contract, one.fabric, self.tuned),
            scale=factor,
            slowdown=slowed,
            cuda=self.plan.device == "cuda",
            container=self.plan.container,
            torchrun=self.plan.launcher == "torchrun",
        )

    def factors(self, one: PointGroup) -> tuple[float, float]:
        """s and t of the scale model. A native fabric cannot be scaled, nor slowed; a timeline is read in real time."""
        if not self.plan.device.startswith("emulated:") or not (self.shaped or one.nodes == 1):
            return 1.0, 1.0
        slowed = 1.0 if self.timeline or not self.shaped else unfold.slowdown(self.plan, one.points[0])
        return scale_model.factor(one.nodes, one.points[0].rate_gbps, slowed), slowed

    def checked(self, point: Point) -> bool:
        """Whether a point is run at 2s too: where there is a scaled network to be wrong about."""
        return self.check and point.nodes > 1 and point.device.startswith("emulated:") and self.shaped

    def capture_timeline(self) -> None:
        """Run the last Horovod point once more with its timeline on; that run is not a trial, tracing costs time."""
        launches = [one for one in self.launches if one.engine.startswith("horovod")]
        if not launches:
            raise UserError("--timeline: the plan has no horovod engine; only Horovod writes a timeline")
        # Single bits are gathered, not summed: a timeline of all-reduces would be empty.
        summed = [point for point in launches[-1].points if point.compression != "1bit"] or launches[-1].points
        one = replace(launches[-1], points=tuple(summed[-1:]))
        self.check, self.timeline = False, True
        target = self.folder.folder / f"timeline-{one.points[0].id}.json"
        remote = f"/home/horovod/timeline-{int(time.time())}.json"
        job = replace(self.job(one, nodes.install_worker(self.contract, self.names[: one.nodes])), timeline=remote)
        begin = self.folder.folder / "logs/timeline.log"
        with begin.open("w") as log:
            done = subprocess.run(
                nodes.as_training_account(self.contract, job.hosts[0], launch.argv(job)),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        fetch = f"sudo cat {remote} && sudo rm -f {remote}"
        found = subprocess.run(nodes.ssh(self.contract, job.hosts[0], fetch), capture_output=True, text=True)
        if done.returncode or found.returncode:
            raise InfraError(f"--timeline: nothing was captured: {last_words(begin)}")
        target.write_text(found.stdout)
        console.print(f"timeline of the last point: {target} (bench timeline {target})", markup=False)

    def spec(self, one: PointGroup, factor: float, slowed: float = 1.0) -> str:
        trials = []
        link = self.plan.links.get(one.fabric)
        emulated = self.plan.device.startswith("emulated:")
        for point in one.points:
            for s in (factor, 2 * factor) if self.checked(point) else (factor,):
                trials.append(
                    {
                        "id": point.id,
                        "device": point.device.partition(":")[0],
                        "model": point.model,
                        "batch": point.batch,
                        "pixels": models.get(point.model).input_pixels,
                        "check": s != factor,
                        "scale": s,
                        "slowdown": slowed,
                        "rate_mbit": point.rate_gbps * 1000 / s / slowed if self.shaped else None,
                        "burst_ms": link.burst_ms * slowed if link and link.burst_ms else None,
                        "gradients": models.get(point.model).gradients_in_backward_order() if emulated else [],
                        "compute_ms": unfold.compute_ms(self.plan, point)[0] if emulated else None,
                        "compression": point.compression,
                        "images": point.batch * point.gpus,
                        "seconds": self.plan.seconds,
                        "data": self.input(point, s if emulated and self.shaped else 1.0),
                    }
                )
        first = {key: trials[0][key] for key in ("rate_mbit", "burst_ms")}
        spec = {"trials": trials, "one_thread": emulated, **first}
        return base64.b64encode(json.dumps(spec).encode()).decode()

    def input(self, point: Point, factor: float) -> dict[str, Any] | None:
        """Where a rank gets its images. Over a fabric that is slower by s it reads each sample once for s uses, so that
        reading takes the time it takes on the real fabric; what is on a node's own disk is not scaled."""
        if point.data == "synthetic":
            return None
        location = point.data.partition(":")[2]
        reused = max(1, round(factor)) if "://" in location else 1
        plan = self.plan
        choices = {"cores": plan.data_cores, "policy": plan.data_policy, "strict": plan.data_strict}
        return {"location": location, "reused": reused, "loader": plan.data_loader, **choices}

    def keep(self, trial: Trial) -> None:
        self.folder.append(trial)
        if trial.status == "ok" and trial.images_per_second and trial.step_ms:
            text = f"{trial.images_per_second.median:8.1f} images/s, step {trial.step_ms.median:.0f} ms"
            if trial.emulation and trial.emulation.converged is False:
                text += f" (not converged: x{trial.emulation.check_ratio:.2f} at 2s)"
        else:
            text = f"FAILED: {trial.error}"
        self.progress.finished(trial.id, label(trial.point), text)


def label(point: Point) -> str:
    more = "" if point.data == "synthetic" else ", real data"
    more += "" if point.compression == "none" else f", {point.compression}"
    return f"{point.engine} {point.fabric} {point.nodes} nodes, batch {point.batch}, {point.model}{more}"


class Attempt:
    """One launch under way: reads the worker's lines, notices when it falls silent, ends it whatever happens."""

    def __init__(
        self, sweep: Sweep, one: PointGroup, job: launch.Launch, worker: str, interface: str, log: str, started: str
    ) -> None:
        self.sweep, self.one, self.job, self.interface, self.log, self.started = (
            sweep,
            one,
            job,
            interface,
            log,
            started,
        )
        self.argv = sweep.executor.argv(job, worker)
        self.points = {point.id: point for point in one.points}
        self.main: dict[str, dict[str, Any]] = {}
        self.told: str | None = None
        fabric = sweep.contract.fabrics.get(one.fabric)
        self.nccl = nccl_log.Log(fabric.transport if fabric else "tcp", interface) if job.cuda else None

    def run(self) -> None:
        begin = time.monotonic()
        with (self.sweep.folder.folder / self.log).open("w", buffering=1) as log:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=pump, args=(process, lines), daemon=True).start()
            try:
                problem = self.listen(lines, log, begin)
            finally:
                self.end(process)
        if problem is None and self.points:
            problem = "the worker ended early"
        if problem:
            self.fail(problem)

    def end(self, process: subprocess.Popen[str]) -> None:
        """Closing standard input makes the supervisor on the head end every rank."""
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(timeout=self.sweep.executor.grace)
        except subprocess.TimeoutExpired:
            process.kill()

    def listen(self, lines: queue.Queue[str | None], log: Any, begin: float) -> str | None:
        limit = START_LIMIT
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                return f"no word from the worker for {limit:.0f} s"
            if line is None:
                return None
            log.write(line)
            # horovodrun puts the rank in front of a line
            _, mark, content = line.partition("@bench ")
            if not mark:
                if self.nccl:
                    self.nccl.read(line)
                continue
            event = json.loads(content)
            limit = SILENCE
            self.show(event)
            if event["event"] == "started":
                self.sweep.spent["launch"] += (seconds := time.monotonic() - begin)
                self.launch_s = seconds
            elif event["event"] == "failed":
                self.told = event["error"]
                return self.told
            elif event["event"] == "trial":
                self.sweep.spent["warm-up"] += event["warmup_s"]
                self.sweep.spent["measure"] += event["measure_s"]
                self.finish(event)

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.sweep.progress.doing(f"{event['size']} processes", "started")
        elif event["event"] in ("warmup", "progress"):
            rate = event.get("images_per_second")
            state = f"{rate:.1f} images/s so far" if rate else "warming up"
            self.sweep.progress.doing(label(self.points[event["id"]]), state)

    def finish(self, event: dict[str, Any]) -> None:
        point = self.points[event["id"]]
        if self.sweep.checked(point) and not event["check"]:
            self.main[point.id] = event
            return
        main, check = (self.main[point.id], event) if event["check"] else (event, None)
        emulated = point.device.startswith("emulated:")
        compute = unfold.compute_ms(self.sweep.plan, point) if emulated else None
        trial = record.trial(
            point, main, check, compute, self.interface, self.launch_s, self.started, self.sweep.link_share, self.nccl
        )
        steps = self.sweep.folder.write_steps(point.id, main["ranks"])
        self.sweep.keep(trial.model_copy(update={"log": self.log, "step_times": steps}))
        del self.points[point.id]

    def fail(self, problem: str) -> None:
        silent = self.sweep.executor.silent(list(self.job.hosts))
        self.sweep.lost.update(silent)
        if silent:
            problem = f"node {silent[0]} does not answer ({problem})"
        elif not self.told:
            problem = f"{problem}: {last_words(self.sweep.folder.folder / self.log)}"
        for point in self.points.values():
            node = silent[0] if silent else None
            self.sweep.keep(record.failure(point, problem, node, self.started, self.log))


def pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("@bench", "---"))]
    telling = [line for line in lines if "Error" in line or "error" in line]
    return (telling or lines or ["it said nothing"])[-1][:300]


def efficiency(trial: Trial, trials: list[Trial]) -> float | None:
    """Images/s per GPU against the same point on one node."""
    same = trial.point.model_copy(update={"nodes": 1, "repeat": 0}).id
    single = next((one for one in trials if one.id == same), None)
    if not (single and single.images_per_second and trial.images_per_second):
        return None
    return trial.images_per_second.median / trial.point.nodes / single.images_per_second.median


def show(trials: list[Trial], wanted: Plan, spent: dict[str, float], folder: store.RunFolder) -> None:
    emulated = any(trial.kind == "emulated" for trial in trials)
    table = Table(title=("EMULATED " if emulated else "") + (wanted.title or "results"), title_justify="left")
    for column in ("engine", "fabric", "nodes", "batch", "images/s", "95%", "step ms", "efficiency", "CPU %", "note"):
        table.add_column(column)
    for trial in trials:
        point, rate, step = trial.point, trial.images_per_second, trial.step_ms
        note = trial.error or ""
        if trial.emulation and trial.emulation.converged is False:
            note = f"not converged (x{trial.emulation.check_ratio:.2f} at 2s)"
        if trial.input and trial.breakdown_ms and step:
            note += f" real data: {trial.breakdown_ms.data_wait / step.median:.0%} wait"
        share = efficiency(trial, trials)
        table.add_row(
            *(point.engine, point.fabric, str(point.nodes), str(point.batch)),
            f"{rate.median:.1f}" if rate else "-",
            f"{rate.low:.1f}-{rate.high:.1f}" if rate else "-",
            f"{step.median:.1f}" if step else "-",
            f"{share:.0%}" if share else "-",
            f"{trial.host_cpu_percent:.0f}" if trial.host_cpu_percent is not None else "-",
            note.strip(),
        )
    console.print(table)
    for known in wanted.compare:
        for trial in trials:
            point = trial.point
            if (point.fabric, point.nodes, point.batch) == (known.fabric, known.nodes, known.batch) and trial.step_ms:
                ours = trial.step_ms.median
                console.print(
                    f"{known.fabric}, {known.nodes} nodes: {ours:.1f} ms, published {known.step_ms:.1f} ms "
                    f"({ours / known.step_ms - 1:+.1%}; {known.source})",
                    markup=False,
                )
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
    console.print(f"time: {parts}. Results: {folder.folder}", markup=False)
