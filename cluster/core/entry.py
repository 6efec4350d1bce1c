"""How `bench` and `cluster` start and end: one line for a wrong word, and one line and an exit code for every error."""

from __future__ import annotations

import argparse
import errno
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from cluster.core.errors import InfraError, UserError, bounded
from cluster.core.lock import without_value
from cluster.core.printable import Printable

EXIT_CODES = "Exit codes: 0 ok, 1 a finding, 2 bad input, 3 infrastructure failure or a bug, 130 interrupted."
INTERRUPTED = 130
# 128 + SIGPIPE, as the shell reports it.
READER_GONE = 141


class Parser(argparse.ArgumentParser):
    """argparse prints its whole usage for one wrong word; this says what is wrong and where the usage is."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{bounded(message.removeprefix('argument '))}; see `{self.prog} --help`")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Before Python 3.13, --option=-- gives the option an empty list.
        values = super()._get_values(action, arg_strings)
        if values == [] and action.nargs is None and action.option_strings:
            raise argparse.ArgumentError(action, "expected one argument")
        return values


def reader_gone() -> bool:
    """Whether the program that reads our standard output has ended, as `head` does after ten lines."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def guard(name: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command. Whatever goes wrong in it becomes one line on standard error and an exit code."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Printable(sys.stdout), Printable(sys.stderr)
    try:
        return ended(name, command, interrupted)
    finally:
        sys.stdout, sys.stderr = streams


def ended(name: str, command: Callable[[], int], interrupted: str) -> int:
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except (UserError, InfraError) as error:
        text, code = str(error), error.exit_code
    except KeyboardInterrupt:
        text, code = interrupted, INTERRUPTED
    except BrokenPipeError as error:
        if not reader_gone():
            text, code = bug(name, error), InfraError.exit_code
        else:
            # Python flushes standard output once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
    except subprocess.CalledProcessError as error:
        tool = os.fspath(error.cmd[0]) if isinstance(error.cmd, list) else error.cmd
        said = (error.stderr or b"") if isinstance(error.stderr, bytes | None) else error.stderr.encode()
        last = (said.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        text, code = f"{tool} failed (exit {error.returncode}): {last}", InfraError.exit_code
    except OSError as error:
        text, code = failed_call(name, error), InfraError.exit_code
    except Exception as error:
        text, code = bug(name, error), InfraError.exit_code
    print(f"{name}: {bounded(text)}", file=sys.stderr)
    return code


def failed_call(name: str, error: OSError) -> str:
    """A file or a program that the system refused."""
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if error.errno == errno.ENOSPC:
        # Whichever file did not fit: files that are already written stay intact.
        return f"{where}{': ' if where else ''}the disk is full; make room and run the same command again"
    if not where:
        return bug(name, error)
    if isinstance(error, FileNotFoundError) and "/" not in where:
        return f"{where}: not found; if it is a program, run `make setup`"
    return f"{where}: {error.strerror}"


def bug(name: str, error: Exception) -> str:
    """Keep the traceback in a file, which a bug report needs and a terminal does not."""
    kind = f"{type(error).__name__}: {bounded(str(error), 200)}"
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"{name}-", suffix=".log", delete=False) as file:
            file.write(f"{name} {' '.join(map(repr, map(without_value, sys.argv[1:])))}\n{traceback.format_exc()}")
        return f"this is a bug: {kind}; please report it with {file.name}"
    except OSError:
        return f"this is a bug: {kind}; please report it"
