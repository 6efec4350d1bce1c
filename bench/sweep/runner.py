"""A sweep: run its launches in turn on an executor and save every trial as soon as it ends."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime

from bench.plan import unfold
from bench.plan.schema import Plan
from bench.plan.unfold import PointGroup, Tuned
from bench.results.store import RunFolder
from bench.results.trial import LinkEvidence, Point, Settings, Trial
from bench.sweep import launch as launchers
from bench.sweep import record, spec
from bench.sweep.attempt import Attempt, last_line
from bench.sweep.executors import Executor
from bench.sweep.launch import Launch, SpecFile
from bench.sweep.progress import Progress, console, label
from bench.worker.protocol import Spec
from cluster.core import lock, progress, ssh
from cluster.core.config import layout
from cluster.core.errors import InfraError, UserError


class Sweep:
    """One run of a plan on a cluster."""

    def __init__(
        self, plan: Plan, folder: RunFolder, executor: Executor, tuned: Tuned, link: LinkEvidence | None, check: bool
    ) -> None:
        self.plan, self.folder, self.check = plan, folder, check
        self.executor, self.tuned, self.link = executor, tuned, link
        self.contract = executor.contract
        self.groups = list(unfold.points(plan, self.contract, tuned))
        self.names = self.contract.compute
        self.spent = {"launch": 0.0, "warm-up": 0.0, "measure": 0.0, "other": 0.0}
        self.offline: set[str] = set()

    def run(self) -> dict[str, float]:
        done = self.done()
        work = unfold.estimate(self.plan, self.groups)
        if present := done & work.keys():
            console.print(f"{len(present)} of {len(work)} trials are already measured")
        rest = [(group, tuple(point for point in group.points if point.id not in done)) for group in self.groups]
        pending = [replace(group, points=points) for group, points in rest if points]
        if pending:
            shown = progress.Progress(console=console)
            with shown.phase("sweep", quiet=True), lock.measuring(self.contract.provider, shown.waiting):
                shown.now("sweep", f"copying the worker to {len(self.names)} nodes")
                self.measure(pending, Progress(work, present, shown))
        else:
            # A killed sweep may have left its own rate.
            self.executor.restore(self.names)
        return self.spent

    def measure(self, groups: list[PointGroup], progress: Progress) -> None:
        begin = time.monotonic()
        self.progress = progress
        head = self.contract.head
        self.offline = set(self.executor.offline(list(dict.fromkeys((head, *self.names)))))
        if head in self.offline:
            raise InfraError(f"node {head} launches all trials and is offline: make deploy starts it again")
        if self.executor.has_queue:
            console.print(self.cost(groups))
        nodes = [name for name in self.names if name not in self.offline]
        file = self.executor.install(nodes, self.build_spec(groups))
        try:
            for part, group in enumerate(groups):
                self.run_group(group, replace(file, part=part))
        finally:
            self.executor.restore(nodes)
        # What was measured before this sweep collected it is in the parts and not in the whole.
        self.spent["other"] += max(0.0, time.monotonic() - begin - sum(self.spent.values()))

    def cost(self, groups: list[PointGroup]) -> str:
        """What the launches take from others, as they are estimated."""
        node_s = gpu_s = 0.0
        for group in groups:
            seconds = group.nodes * sum(unfold.estimate(self.plan, [group]).values())
            node_s += seconds
            gpu_s += seconds * group.points[0].gpus_per_node * (self.plan.device == "cuda")
        return f"{len(groups)} jobs, about {node_s / 3600:.2f} node-hours and {gpu_s / 3600:.2f} GPU-hours"

    def done(self) -> set[str]:
        """Trials that need not be measured: they succeeded, under the settings of this sweep."""
        there = {trial.id: trial for trial in self.folder.trials() if trial.status == "ok"}
        points = [(group, point) for group in self.groups for point in group.points if point.id in there]
        changed: dict[str, str] = {}
        for group, point in points:
            compute = unfold.compute_ms(self.plan, point)[0] if spec.emulated(self.plan) else None
            scaling = spec.scaling_of(self.plan, group, self.shaped(group.fabric))
            link = unfold.node_gbytes(self.plan, point)
            if found := spec.other_settings(there[point.id], self.settings(point), compute, scaling, link):
                changed[point.id] = found[0]
        if changed:
            first = next(iter(changed.values()))
            console.print(f"{len(changed)} trials were measured under other settings ({first}): measuring them again")
        if unknown := sum(there[point.id].settings is None for _, point in points if point.id not in changed):
            console.print(f"{unknown} trials of an earlier version do not record their settings and are kept")
        return there.keys() - changed.keys()

    def settings(self, point: Point) -> Settings:
        return spec.settings_of(self.plan, point, unfold.tuning_of(self.contract, point.fabric, self.tuned))

    def build_spec(self, groups: list[PointGroup], check: bool | None = None, real_time: bool = False) -> Spec:
        check = self.check if check is None else check
        launches = []
        for group in groups:
            scaling = spec.scaling_of(self.plan, group, self.shaped(group.fabric), real_time)
            launches.append(spec.launch_spec(self.plan, group, self.shaped(group.fabric), scaling, check))
        return Spec(launches, spec.gradients(self.plan, self.plan.models))

    def run_group(self, group: PointGroup, file: SpecFile) -> None:
        offline = [host for host in self.names[: group.nodes] if host in self.offline]
        started = datetime.now(UTC).isoformat(timespec="seconds")
        if offline:
            for point in group.points:
                self.save(record.failure(point, f"node {offline[0]} is offline", offline[0], started, None))
            return
        launch = self.launch(group, file, spec.scaling_of(self.plan, group, self.shaped(group.fabric)))
        log = f"logs/{group.engine}-{group.fabric}-{group.nodes}-{launch.run}.log"
        self.progress.doing(f"{group.engine} {group.fabric} {group.nodes} nodes", "starting")
        Attempt(self, group, launch, log, started).run()

    def launch(self, group: PointGroup, file: SpecFile, scaling: spec.Scaling) -> Launch:
        # A link of the plan is shaped on the active fabric.
        name = group.fabric if group.fabric in self.contract.fabrics else self.contract.active_fabric
        fabric = self.contract.fabrics[name]
        return Launch(
            run=f"{int(time.time() * 1000):x}",
            name=f"{self.folder.folder.name} {group.fabric}",
            engine=group.engine,
            hosts=tuple(self.names[: group.nodes]),
            slots=group.points[0].gpus_per_node,
            subnet=self.contract.subnet(name),
            interface=self.contract.interface(self.contract.head, name),
            transport=fabric.transport,
            spec=file,
            settings=unfold.tuning_of(self.contract, group.fabric, self.tuned),
            scale=scaling.scale,
            slowdown=scaling.slowdown,
            cuda=self.plan.device == "cuda",
            container=self.plan.container,
            torchrun=self.plan.launcher == "torchrun",
        )

    def shaped(self, fabric: str) -> bool:
        """A link that only the plan has is shaped on the active fabric."""
        return self.contract.fabrics.get(fabric, self.contract.fabrics[self.contract.active_fabric]).shaped

    def is_checked(self, point: Point) -> bool:
        return self.check and spec.is_checked(point, self.shaped(point.fabric))

    def save(self, trial: Trial) -> None:
        self.folder.append(trial)
        if trial.status == "ok" and trial.images_per_second and trial.step_ms:
            text = f"{trial.images_per_second.median:8.1f} images/s, step {trial.step_ms.median:.0f} ms"
            if trial.emulation and trial.emulation.converged is False:
                text += f" (not converged: x{trial.emulation.check_ratio:.2f} at twice the scale factor)"
        else:
            text = f"FAILED: {trial.error}"
        self.progress.finished(trial.id, label(trial.point), text)

    def capture_timeline(self) -> None:
        """Run the last Horovod point again with its timeline. This is not a trial: tracing takes time."""
        groups = [group for group in self.groups if group.engine.startswith("horovod")]
        if not groups:
            raise UserError("--timeline: the plan has no horovod engine; only Horovod writes a timeline")
        # 1bit gradients are gathered, so their timeline would have no all-reduce.
        summed = [point for point in groups[-1].points if point.compression != "1bit"] or groups[-1].points
        group = replace(groups[-1], points=tuple(summed[-1:]))
        target = self.folder.folder / f"timeline-{group.points[0].id}.json"
        remote = f"/home/{layout()['user']}/timeline-{int(time.time())}.json"
        file = self.executor.install(self.names[: group.nodes], self.build_spec([group], check=False, real_time=True))
        scaling = spec.scaling_of(self.plan, group, self.shaped(group.fabric), real_time=True)
        launch = replace(self.launch(group, file, scaling), timeline=remote)
        log = self.folder.folder / "logs/timeline.log"
        head = self.contract.head
        with lock.measuring(self.contract.provider), log.open("w") as out:
            argv = ssh.as_training_account(self.contract, head, launchers.argv(launch))
            done = subprocess.run(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.executor.restore(self.names[: group.nodes])
        fetched = ssh.run_on_all(self.contract, [head], f"sudo cat {remote} && sudo rm -f {remote}")[head]
        if done.returncode or fetched.returncode:
            raise InfraError(f"--timeline: no timeline was recorded: {last_line(log)}")
        target.write_text(fetched.stdout)
        console.print(f"timeline of the last point: {target} (bench timeline {target})")
