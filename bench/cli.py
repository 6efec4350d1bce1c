"""The `bench` command and its subcommands."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from pathlib import Path

from bench import __version__
from cluster.core import entry, paths

# subcommand -> module with configure(parser) and run(args) -> exit code. Imported only when used: start-up stays fast.
COMMANDS = {
    "sweep": "bench.sweep.command",
    "run": "bench.run.command",
    "runs": "bench.run.runs",
    "comm": "bench.comm.command",
    "tune": "bench.tune.command",
    "selfcheck": "bench.selfcheck.command",
    "elastic": "bench.elastic.command",
    "converge": "bench.converge.command",
    "report": "bench.report.command",
    "explain": "bench.explain.command",
    "compare": "bench.compare",
    "export": "bench.export",
    "timeline": "bench.timeline",
    "jupyter": "bench.jupyter",
    "predict": "bench.predict.command",
    "plan": "bench.sizing.command",
    "data": "bench.data.command",
    "render": "bench.render.command",
}
# They use Terraform, Ansible or the notebooks. The others work wherever the package is installed.
NEED_CHECKOUT = {"render", "sweep", "run", "runs", "comm", "tune", "elastic", "converge", "selfcheck", "jupyter"}


def summary(module: str) -> str:
    """The first line of a module's docstring, without importing the module."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text() if spec and spec.origin else ""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    text = "Measure, explain and predict how training scales."
    parser = entry.Parser(prog="bench", description=text, epilog=entry.EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"bench {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    requested = next((word for word in argv if word in COMMANDS), None)
    for name, module in COMMANDS.items():
        if requested not in (None, name):
            subparsers.add_parser(name)
            continue
        text = summary(module)
        sub = subparsers.add_parser(name, help=text, description=text)
        if requested == name:
            importlib.import_module(module).configure(sub)
    return parser


def run(argv: list[str]) -> int:
    args = build_parser(argv).parse_args(argv)
    if args.command in NEED_CHECKOUT:
        # A dry run reads cluster.yml and nothing else.
        paths.require_checkout(paths.CHECKOUT[:1] if getattr(args, "dry_run", False) else paths.CHECKOUT)
    code: int = importlib.import_module(COMMANDS[args.command]).run(args)
    return code


def main(argv: list[str] | None = None) -> int:
    return entry.guard("bench", lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
