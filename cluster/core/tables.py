"""Plain tables for the terminal. They stay whole when they are piped."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

# No table of ours is wider, so nothing wraps in a file or a pipe.
UNLIMITED = 10_000


def columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as text. A column of numbers is aligned to the right."""
    # rich takes a tenth of a second to import, which --json and --help need not pay.
    from rich.table import Table

    from cluster.core.terminal import Console

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="")
    for at, title in enumerate(head):
        numbers = all(_is_number(str(row[at])) for row in rows)
        table.add_column(title, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.strip("+-%x").replace(",", "").replace(".", "", 1).isdigit()
