"""The `bench` command: runs a subcommand and turns our errors into one line and an exit code."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import importlib.util
import os
import select
import sys
from pathlib import Path

from bench import __version__
from cluster.core import paths
from cluster.core.errors import InfraError, UserError

# subcommand -> module with configure(parser) and run(args) -> exit code. Imported only when used: start-up stays fast.
COMMANDS = {
    "sweep": "bench.sweep.command",
    "comm": "bench.comm.command",
    "tune": "bench.tune.command",
    "report": "bench.report.command",
    "explain": "bench.explain.command",
    "compare": "bench.compare",
    "export": "bench.export",
    "timeline": "bench.timeline",
    "jupyter": "bench.jupyter",
    "predict": "bench.predict.command",
    "plan": "bench.sizing.command",
    "data": "bench.data.command",
}
# They use Terraform, Ansible or the notebooks. The others work wherever the package is installed.
NEED_CHECKOUT = {"sweep", "comm", "tune", "jupyter"}
# 128 + SIGPIPE, as the shell reports it.
READER_GONE = 141


def summary(module: str) -> str:
    """The first line of a module's docstring, without importing the module."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text() if spec and spec.origin else ""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure, explain and predict how training scales.",
        epilog="Exit codes: 0 ok, 1 a finding, 2 bad input, 3 infrastructure failure.",
    )
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


def reader_gone() -> bool:
    """Whether the program that reads our standard output has ended, as `head` does after ten lines."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def main(argv: list[str] | None = None) -> int:
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except (UserError, InfraError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_gone():
            # Python flushes standard output once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        # Whichever file did not fit: files that are already written stay intact.
        if error.errno != errno.ENOSPC:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"bench: {where}the disk is full; make room and run the same command again", file=sys.stderr)
        return InfraError.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
