"""The Python API: a run with its points, verdict, data frame and plots. docs/python-api.md documents it."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.results import dimensions, runs
from bench.results.points import Family, MergedPoint
from bench.results.trial import Interval
from cluster.core.errors import UserError

if TYPE_CHECKING:
    import altair
    import pandas

    from bench.report.page import Report


def load(path: str | Path = "latest") -> Run:
    return Run(**vars(runs.load(path)))


class Run(runs.Run):
    """One run. The files are read by `load`; a rerun does not change an open Run."""

    @cached_property
    def _report(self) -> Report:
        # The charts' library takes most of a second to import.
        from bench.report import page

        return page.make(self)

    @property
    def points(self) -> list[MergedPoint]:
        """Every measured set of conditions, with its repeats merged and its scaling efficiency."""
        return self._report.table.points

    @property
    def families(self) -> list[Family]:
        """The combinations of model, hardware and engine that were measured, the one with the most points first."""
        return self._report.table.families

    @property
    def verdict(self) -> str:
        """The report's sentence: how the cluster scales, what limits it, and what would help."""
        return self._report.verdict.sentence

    @property
    def findings(self) -> list[str]:
        """The sentences below the verdict in the report."""
        return self._report.verdict.findings

    def frame(self) -> pandas.DataFrame:
        """The points as a data frame, one row each. Times are in ms; `_low` and `_high` bound the 95% interval."""
        try:
            import pandas
        except ImportError:
            raise UserError("run.frame(): pandas is not installed; install it with `pip install pandas`") from None
        # Along a curve only the nodes vary; with strong scaling, the batch per GPU too.
        along = ("nodes", "repeat", "batch") if self._report.table.strong else ("nodes", "repeat")
        varying = dimensions.varying((point.conditions for point in self.points), without=along)
        return pandas.DataFrame([self._row(point, varying) for point in self.points])

    def _row(self, point: MergedPoint, varying: list[str]) -> dict[str, Any]:
        total = f"total batch {point.group}" if self._report.table.strong else ""
        parts = point.breakdown.model_dump() if point.breakdown else {}
        return {
            **asdict(point.family),
            "family": point.family.label,
            "curve": ", ".join(filter(None, [dimensions.label(point.conditions, varying), total])) or "all points",
            "fabric": point.fabric,
            "rate_gbps": point.rate_gbps,
            "nodes": point.nodes,
            "gpus": point.gpus,
            "batch": point.batch,
            "repeats": len(point.trials),
            **interval("images_per_second", point.ips),
            "ideal_images_per_second": point.ideal,
            **interval("efficiency", point.efficiency),
            **interval("step_ms", point.step_ms),
            **{f"{name}_ms": parts.get(name) for name in ("compute", "exposed_comm", "data_wait", "straggler_wait")},
            **interval("bus_gbps", point.bus_gbps),
            "link_gbps": point.link_gbps,
            "host_cpu_percent": point.host_cpu,
            "limit": self._report.limits[point.trials[0].id],
        }

    def charts(self, family: Family | None = None) -> dict[str, altair.TopLevelMixin]:
        """The report's plots by name, as Altair charts, for one family (default: the first)."""
        from bench import charts
        from bench.report import plots

        if not self.families:
            return {}
        report = self._report
        drawn = plots.charts_for(report.table, family or self.families[0], report.constructed, report.limits)
        return {name: chart.properties(config=charts.style()) for name, chart in drawn.items()}

    def caveat(self, family: Family | None = None) -> str:
        """What the report writes on every plot, such as "EMULATED P100"; empty for real GPUs. Put it on yours too."""
        from bench import charts

        if not self.families:
            return ""
        family = family or self.families[0]
        return charts.caveat(family, self._report.table.of(family), self._report.constructed)

    def explain(self) -> str:
        """The text of `bench explain`: the weakest link, the next one, and what single changes would give."""
        from bench.explain import command

        return command.as_text(command.explain_run(self))

    def _repr_markdown_(self) -> str:
        """What a notebook shows for a run: the verdict, and what could not be read."""
        from bench.report.page import markdown

        return "\n".join([f"**{markdown(self.verdict)}**", "", *(f"- {markdown(text)}" for text in self.problems)])


def interval(name: str, value: Interval | None) -> dict[str, float | None]:
    if value is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
