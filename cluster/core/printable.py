"""Text without control characters: a file, a node or an argument must not steer the reader's terminal."""

from __future__ import annotations

from typing import Any, TextIO

# C0 without tab and line feed, delete, and C1. An escape sequence starts with one of them.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """The text with each control character as it is written in Python."""
    return text.translate(CONTROL)


class Printable:
    """A stream for print(). rich writes to the stream below it and cleans its own text (cluster/core/terminal.py)."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        encoding = self.rich_proxied_file.encoding or "utf-8"
        return self.rich_proxied_file.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
