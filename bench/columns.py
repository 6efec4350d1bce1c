"""Plain tables for the terminal: they stay whole when piped."""

from __future__ import annotations

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; cells that are numbers stand on the right."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]

    def line(cells: Sequence[str], like: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if _is_number(model) else cell.ljust(width)
            for cell, width, model in zip(cells, widths, like, strict=True)
        ).rstrip()

    first = rows[0] if rows else head
    return "\n".join([line(head, first), *(line(row, row) for row in rows)])


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.strip("+-%").replace(",", "").replace(".", "", 1).isdigit()


def percent(value: float, signed: bool = False) -> str:
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"
