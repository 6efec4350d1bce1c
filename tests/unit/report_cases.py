"""What the report's tests share: the recorded cases, and ways to damage them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.explain import verdict
from bench.results import runs
from bench.results.points import tabulate

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"
ANSWERS: dict[str, dict[str, str]] = json.loads((RUNS / "answers.json").read_text())


def copy(name: str, to: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> Path:
    """A copy of a recorded run, each trial changed by `change` (return False to drop it)."""
    folder = to / name
    shutil.copytree(RUNS / name, folder)
    if change is not None:
        lines = []
        for line in (folder / "trials.jsonl").read_text().splitlines():
            trial = json.loads(line)
            if change(trial) is not False:
                lines.append(json.dumps(trial))
        (folder / "trials.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def judged(path: Path) -> verdict.Verdict:
    run = runs.load(path)
    return verdict.judge(tabulate(run.trials))
