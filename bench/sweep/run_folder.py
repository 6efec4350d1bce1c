"""Open the folder of a run. It is one folder below results/<env>/, and it belongs to one plan."""

from __future__ import annotations

from bench.plan import identity
from bench.plan.schema import Plan
from bench.results import store
from bench.results.store import RunFolder
from cluster.core import files
from cluster.core.errors import UserError

LONGEST_NAME = 100
# Folders of results/<env>/ that belong to other commands, and the name that stands for the newest run.
RESERVED = ("comm", "converge", "elastic", "runs", "latest")
WAY_OUT = "use --run NAME for another folder, or --fresh for a new one"


def check_name(name: str) -> None:
    if not name.isprintable() or "/" in name or name[:1] in ("", ".", "-") or len(name) > LONGEST_NAME:
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        raise UserError(f"--run: {shown!r} is not the name of a folder; use letters, digits, dots and dashes")
    if name in RESERVED:
        raise UserError(f"--run: {name!r} has another meaning in results/; choose another name with --run NAME")


def open_run(env: str, name: str, plan: Plan) -> RunFolder:
    """The run's folder, if it is new or belongs to this plan. Writes nothing."""
    check_name(name)
    run = RunFolder(store.RESULTS / env / name)
    path = run.folder / "plan.json"
    # Trials without a plan, such as a file that somebody copied, are completed: each records how it was measured.
    if not path.exists():
        return run
    where = f"results/{env}/{name}"
    try:
        old = files.validate(Plan, files.mapping(path), path.name, "plan")
    except UserError as error:
        raise UserError(f"{where}: its plan cannot be read ({error}); {WAY_OUT}") from None
    if changed := identity.differences(old, plan):
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(f"{where} belongs to another plan: {changed[0]}{more}; {WAY_OUT}")
    return run
