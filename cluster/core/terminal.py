"""rich's console, for text from files and nodes: their control characters are shown, not sent to the terminal."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from cluster.core.printable import printable


class Console(rich.console.Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            # Control segments are rich's own: colours and movements of the cursor.
            yield Segment(text if control else printable(text), style, control)
