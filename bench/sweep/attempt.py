"""One launch: read the worker's events, detect a timeout, and always end the launch."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, TextIO

from bench.plan import asynchronous, split_engines, unfold
from bench.plan.unfold import PointGroup
from bench.results.trial import Trial
from bench.sweep import nccl_log, record, transport
from bench.sweep.launch import Launch
from bench.sweep.progress import label
from bench.worker import protocol
from bench.worker.protocol import Allocation, Failed, Progress, Started, TrialDone, WarmUp
from cluster.core.process import die_with_parent

if TYPE_CHECKING:
    from bench.sweep.runner import Sweep

# Seconds without output from the worker after which a launch fails.
OUTPUT_TIMEOUT = 25.0
START_TIMEOUT = 90.0
# Seconds that each rank adds where many load torch on the same cores.
START_PER_RANK = 6.0


class Attempt:
    def __init__(self, sweep: Sweep, group: PointGroup, launch: Launch, log: str, started: str) -> None:
        self.sweep, self.launch, self.log, self.started = sweep, launch, log, started
        self.points = {point.id: point for point in group.points}
        self.main: dict[str, TrialDone] = {}
        self.launch_s = 0.0
        self.reported: str | None = None
        self.job: str | None = None
        transport = group.points[0].transport
        self.nccl = nccl_log.Log(transport, launch.interface, launch.subnet) if launch.cuda else None

    def run(self) -> None:
        begin = time.monotonic()
        with (self.sweep.folder.folder / self.log).open("w", buffering=1) as log:
            argv = self.sweep.executor.argv(self.launch)
            process = Popen(argv, stdin=PIPE, stdout=PIPE, stderr=log, text=True, preexec_fn=die_with_parent)
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=pump, args=(process, lines), daemon=True).start()
            try:
                problem = self.listen(lines, log, begin)
            finally:
                self.end(process)
        if problem is None and self.points:
            problem = "the worker ended without all results"
        if problem:
            self.fail(problem)

    def end(self, process: Popen[str]) -> None:
        """Closing standard input makes the supervisor on the head end every rank."""
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(timeout=self.sweep.executor.grace)
        except TimeoutExpired:
            process.kill()

    def listen(self, lines: queue.Queue[str | None], log: TextIO, begin: float) -> str | None:
        """The error, or None if the output ended normally."""
        timeout = start_timeout = max(START_TIMEOUT, START_PER_RANK * self.launch.processes)
        while True:
            try:
                line = lines.get(timeout=timeout)
            except queue.Empty:
                return f"the worker produced no output for {timeout:.0f} s"
            if line is None:
                return None
            log.write(line)
            event = protocol.parse(line)
            if event is None:
                if self.nccl:
                    self.nccl.read(line)
                continue
            # A GPU's first steps search for the fastest convolutions.
            prepares = self.launch.cuda and isinstance(event, Started | TrialDone)
            timeout = start_timeout if prepares else OUTPUT_TIMEOUT
            if isinstance(event, Allocation):
                # Time in the queue is no time of the launch.
                timeout, begin, self.job = start_timeout, time.monotonic(), event.job
                self.sweep.progress.doing(f"job {event.job}", queued(event))
            elif isinstance(event, Started):
                self.launch_s = time.monotonic() - begin
                self.sweep.spent["launch"] += self.launch_s
                self.sweep.progress.doing(f"{event.size} processes", "started")
            elif isinstance(event, WarmUp | Progress | TrialDone) and event.id not in self.points:
                # A launch that Slurm started again repeats what was measured.
                continue
            elif isinstance(event, WarmUp):
                self.show(event.id, "warming up")
            elif isinstance(event, Progress):
                self.show(event.id, f"{event.images_per_second:.1f} images/s so far")
            elif isinstance(event, Failed):
                self.reported = event.error
                return self.reported
            elif isinstance(event, TrialDone):
                self.sweep.spent["warm-up"] += event.warmup_s
                self.sweep.spent["measure"] += event.measure_s
                self.finish(event)

    def show(self, identifier: str, state: str) -> None:
        self.sweep.progress.doing(label(self.points[identifier]), state)

    def finish(self, event: TrialDone) -> None:
        point = self.points[event.id]
        if self.sweep.is_checked(point) and not event.check:
            self.main[point.id] = event
            return
        main, check = (self.main[point.id], event) if event.check else (event, None)
        compute = unfold.compute_ms(self.sweep.plan, point) if point.device.startswith("emulated:") else None
        interface, link = self.launch.interface, self.sweep.link
        how = transport.algorithm(point, self.launch.settings)
        gbytes, launch_s = unfold.node_gbytes(self.sweep.plan, point), self.launch_s
        trial = record.trial(
            *(point, main, check, compute, interface, launch_s, self.started, link, self.nccl, how, gbytes),
            moving_rate=asynchronous.moving_rate(self.sweep.plan, point),
            split_bytes=split_engines.node_bytes(self.sweep.plan, point),
        )
        if self.nccl:
            self.nccl.start_trial()
        steps = self.sweep.folder.write_steps(point.id, main.ranks)
        found: dict[str, Any] = {"log": self.log, "step_times": steps, "settings": self.sweep.settings(point)}
        found["job"] = self.job
        problem = trial.error or (trial.traffic and transport.excess(point, trial.traffic))
        if problem and (others := self.sweep.executor.foreign(self.launch, senders=not trial.error)):
            found["status"] = "failed"
            found["error"] = f"{problem}; other work on the nodes: {'; '.join(others)}"
            found["error_node"] = others[0].partition(":")[0]
        self.sweep.save(Trial.model_validate({**trial.model_dump(), **found}))
        del self.points[point.id]

    def fail(self, problem: str) -> None:
        offline = self.sweep.executor.offline(list(self.launch.hosts))
        self.sweep.offline.update(offline)
        if offline:
            problem = f"node {offline[0]} is offline ({problem})"
        elif not self.reported:
            problem = f"{problem}: {last_line(self.sweep.folder.folder / self.log)}"
        for point in self.points.values():
            node = offline[0] if offline else None
            failed = record.failure(point, problem, node, self.started, self.log)
            self.sweep.save(failed.model_copy(update={"job": self.job}))


def queued(event: Allocation) -> str:
    """The state of a request, such as PENDING (Resources), expected to start at 2026-01-01T10:00:00."""
    reason = f" ({event.reason})" if event.reason else ""
    return f"{event.state}{reason}{f', expected to start at {event.expected}' if event.expected else ''}"


def pump(process: Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def last_line(log: Path) -> str:
    """The last line of a log that contains "error", or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and protocol.MARK not in line and not line.startswith("---")]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["no output"])[-1][:300]
