"""How a run ended: which rank failed first, and its last lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from cluster.core import files
from cluster.core.errors import UserError

SHOWN = 15


@dataclass(frozen=True)
class Failure:
    rank: int
    node: str
    code: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"rank {self.rank} on {self.node} failed first ({how})"


class RankEnd(TypedDict):
    """rank-N.json, which run_agent.py writes."""

    rank: int
    node: str
    code: int
    stopped: bool
    ended: float


class PointState(TypedDict):
    """state.json of a point, which run_launch.py writes."""

    state: str
    hosts: list[str]
    started: NotRequired[float]
    ended: NotRequired[float]


def rank_ends(logs: Path) -> Iterator[tuple[RankEnd, Path]]:
    """How each rank ended, and its log. A full disk may have cut a record off; the log then still says why."""
    for path in logs.glob("rank-*.json"):
        with suppress(UserError):
            yield files.record(path, RankEnd), path.with_suffix(".log")


def first_failure(logs: Path) -> Failure | None:
    """The rank that ended first with an error of its own: a rank that its launcher ended is a consequence."""
    ends = [(end, log) for end, log in rank_ends(logs) if end["code"] and not end["stopped"]]
    failed = sorted(ends, key=lambda one: one[0]["ended"])
    if not failed:
        return None
    first = failed[0][0]
    found = [(end, last_lines(log)) for end, log in failed]
    lines = found[0][1]
    # The same error on every rank, such as a syntax error, is rank 0's.
    for end, others in found:
        if end["rank"] == 0 and others[-1:] == lines[-1:] and end["code"] == first["code"]:
            first, lines = end, others
    return Failure(first["rank"], first["node"], first["code"], lines)


def last_lines(log: Path, count: int = SHOWN) -> tuple[str, ...]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - 20_000, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-count:])


def explain(folder: Path, record: dict[str, Any], shown_rank: bool) -> list[str]:
    """Lines about the points that failed. shown_rank: rank 0's output has been printed already."""
    lines = []
    for point in record["points"]:
        place = folder / point["name"]
        failure = first_failure(place / "logs")
        name = "" if point["name"] == "." else f"{point['name']}: "
        # An elastic run goes on without a rank that failed.
        if failure and state(place)["state"] != "ok":
            lines.append(f"{name}{failure}")
            if not (shown_rank and failure.rank == 0):
                lines += [f"  {line}" for line in failure.lines]
        elif state(place)["state"] == "failed":
            lines.append(f"{name}the launcher failed:")
            lines += [f"  {line}" for line in last_lines(place / "logs/launcher.log")]
    return lines


def state(place: Path) -> PointState:
    file = place / "state.json"
    if not file.exists():
        return PointState(state="not started", hosts=[])
    try:
        return files.record(file, PointState)
    except UserError:
        return PointState(state="unknown, state.json is damaged", hosts=[])


def summary(folder: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per point: its values, state, seconds, and the numbers in its result.json."""
    rows = []
    for point in record["points"]:
        place = folder / point["name"]
        found = state(place)
        row: dict[str, Any] = {**point["values"], "state": found["state"]}
        if found["hosts"]:
            row["nodes"] = ",".join(found["hosts"])
            complete = "started" in found and "ended" in found
            row["seconds"] = round(found["ended"] - found["started"], 1) if complete else None
        # The order of the columns, and no number of the script in the place of ours.
        rows.append(row | results(place / "out/result.json") | row)
    return rows


def results(path: Path) -> dict[str, float]:
    try:
        found = files.mapping(path)
    except UserError:
        return {}
    return {k: v for k, v in found.items() if isinstance(v, int | float)}


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))
