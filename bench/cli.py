"""The `bench` command: finds the subcommand, runs it, turns our errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import sys

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


def summary(module: str) -> str:
    doc = importlib.import_module(module).__doc__ or ""
    return doc.strip().splitlines()[0]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure, explain and predict how training scales.",
        epilog="Exit codes: 0 ok, 1 a finding, 2 bad input, 3 infrastructure failure.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if word in COMMANDS), None)
    for name, module in COMMANDS.items():
        if wanted in (None, name):
            text = summary(module)
            sub = subparsers.add_parser(name, help=text, description=text)
            importlib.import_module(module).configure(sub)
        else:
            subparsers.add_parser(name)
    args = parser.parse_args(argv)
    try:
        code: int = importlib.import_module(COMMANDS[args.command]).run(args)
        return code
    except (UserError, InfraError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        # A log, a plot, whatever it was that did not fit: nothing already written is lost by it.
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
