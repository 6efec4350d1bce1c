"""Generate what the documents repeat: roles/README.md from each role's meta/argument_specs.yml and tests,
docs/trials.schema.json and docs/cluster.schema.json from the models of a trial and of cluster.yml, the table in
docs/sweep.md from the model of a plan, README.md's picture and verdict from the run in docs/example. --check reports
what is stale.

A test's name is the claim it proves, so the tables cannot promise what is not tested.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

import picture
import yaml

from bench.plan.schema import Plan
from bench.results.trial import Trial
from cluster.core.config import ClusterFile

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "roles/README.md"
SCHEMAS = {"docs/trials.schema.json": Trial, "docs/cluster.schema.json": ClusterFile}
SWEEP = ROOT / "docs/sweep.md"
README = ROOT / "README.md"
HEAD = """# Roles

Made by `tests/docs.py` from every role's meta/argument_specs.yml and tests; edit those.

A role has two halves. *install* is slow and the same on every node: it is baked into the image once. *configure* is
fast and needs to know the other nodes. `ansible/roles.yml` gives their order.
"""
SCENARIOS = """
## What each scenario proves

`.venv/bin/python tests/molecule/run.py [scenario ...]` boots nodes of its own for each scenario, applies the role in
check mode, then really, then again (nothing may change), and tests what the nodes then do. Without names it runs all
but those that `make test-cuda` is for: horovod/cuda and nvidia_driver/forced, which take 3 GB and minutes to compile.

| scenario | nodes | proves |
|---|---|---|
"""


def roles() -> list[str]:
    ordered = [entry["role"] for entry in yaml.safe_load((ROOT / "ansible/roles.yml").read_text())["cluster_roles"]]
    found = {path.parent.parent.name for path in ROOT.glob("roles/*/tasks/main.yml")}
    return [role for role in ordered if role in found] + sorted(found - set(ordered))


def specs(role: str) -> dict[str, Any]:
    path = ROOT / "roles" / role / "meta/argument_specs.yml"
    if not path.exists():
        raise SystemExit(f"roles/{role}: no meta/argument_specs.yml")
    content: dict[str, Any] = yaml.safe_load(path.read_text())["argument_specs"]
    return content


def defaults(role: str) -> dict[str, Any]:
    path = ROOT / "roles" / role / "defaults/main.yml"
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def check_against_defaults(role: str, options: dict[str, Any]) -> None:
    """Both files name a role's variables; where a default is a plain value they must say the same."""
    given = defaults(role)
    for name in sorted(given.keys() - options.keys()):
        raise SystemExit(f"roles/{role}: {name} is in defaults/main.yml but not in meta/argument_specs.yml")
    for name, option in options.items():
        if name not in given:
            if not option.get("required") and "default" in option:
                raise SystemExit(f"roles/{role}: {name} has a default in meta/argument_specs.yml only")
        elif "{{" not in str(given[name]) and given[name] != option.get("default"):
            raise SystemExit(
                f"roles/{role}: {name}: defaults/main.yml has {given[name]!r}, meta {option.get('default')!r}"
            )


def text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def variables(role: str) -> str:
    entries = specs(role)
    options = entries["main"].get("options", {})
    check_against_defaults(role, options)
    lines = [f"\n## {role}\n", f"{entries['main']['short_description']}.\n"]
    for half in ("install", "configure"):
        lines.append(f"- {half}: {entries[half]['short_description']}")
    if options:
        lines += ["", "| variable | type | default | meaning | half |", "|---|---|---|---|---|"]
    for name, option in options.items():
        halves = [half for half in ("install", "configure") if name in entries[half].get("options", {})]
        kind = f"{option['type']} of {option['elements']}" if "elements" in option else option["type"]
        default = "*required*" if option.get("required") else text_of(option["default"])
        lines.append(f"| `{name}` | {kind} | {default} | {option['description']} | {', '.join(halves)} |")
    return "\n".join(lines) + "\n"


def claims(folder: Path) -> list[str]:
    found = []
    for path in sorted((folder / "tests").glob("test_*.py")):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        names = [function.name.removeprefix("test_") for function in functions if function.name.startswith("test_")]
        found += [name.replace("_", " ") for name in names]
    return found


def scenarios(role: str) -> str:
    """A row for each scenario; one that borrows the tests of `default` says so."""
    folder = ROOT / "roles" / role / "molecule"
    if not (folder / "default").exists():
        return f"| {role} | | no scenario |\n"
    rows = ""
    for path in sorted(folder.glob("*/molecule.yml")):
        platforms = yaml.safe_load(path.read_text())["platforms"]
        nodes = ", ".join(platform["name"] for platform in platforms)
        image = " and ".join(sorted({platform["image"] for platform in platforms}))
        key = role if path.parent.name == "default" else f"{role}/{path.parent.name}"
        proves, usual = claims(path.parent), claims(folder / "default")
        if key != role and set(proves) <= set(usual):
            left_out = [claim for claim in usual if claim not in proves]
            proves = [f"the same as {role}", *([f"except: {', '.join(left_out)}"] if left_out else [])]
        settings = path.parent / "cluster.yml"
        release = (yaml.safe_load(settings.read_text()) if settings.exists() else {}).get("os_release")
        rows += f"| {key} | {nodes} ({f'{release} ' if release else ''}{image} image) | {'; '.join(proves)} |\n"
    return rows


def plan_table(page: str) -> str:
    """The page with a new table of a plan's fields."""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in Plan.model_fields.items():
        if not field.description:
            raise SystemExit(f"bench/plan/schema.py: {name} has no description")
        default = "*required*" if field.is_required() else "" if field.default is None else text_of(field.default)
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return between_marks(page, "bench/plan/schema.py", "\n".join(lines), "docs/sweep.md")


def between_marks(page: str, source: str, content: str, name: str) -> str:
    """The page with the content between its two marks replaced."""
    before, mark, rest = page.partition(f"from {source} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (mark and end):
        raise SystemExit(f"{name}: the marks around what is made from {source} are gone")
    return f"{before}{mark}\n{content}\n\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    args = parser.parse_args()
    text = HEAD + SCENARIOS + "".join(map(scenarios, roles())) + "".join(map(variables, roles()))
    html, verdict = picture.example()
    readme = between_marks(README.read_text(), "docs/example/quick", f"> {verdict}", "README.md")
    wanted = {TARGET: text, SWEEP: plan_table(SWEEP.read_text()), README: readme}
    for name, model in SCHEMAS.items():
        wanted[ROOT / name] = json.dumps(model.model_json_schema(), indent=1) + "\n"
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    stale += [path for path in picture.PICTURES if picture.shows(path) != picture.digest(html)]
    for path in stale:
        if args.check:
            print(f"{path.relative_to(ROOT)} is stale; run: make docs", file=sys.stderr)
        elif path in wanted:
            path.write_text(wanted[path])
        else:
            picture.draw(html, path)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
