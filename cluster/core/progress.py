"""What a command does now: permanent lines, and one current line per phase that never stays silent.

On a terminal the current line is live. Elsewhere it is printed again and again, so that a log never looks dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.live import Live
from rich.text import Text

from cluster.core.state import CACHE, write_file
from cluster.core.terminal import Console

# Without a terminal, a line follows the last one after this time. Promised are 15 s; a busy machine wakes us up late.
PLAIN_SECONDS = 10.0
# A phase shorter than this had nothing to do; the next one that has would take much longer.
LEARN_FROM_SECONDS = 2.0
STARTED = time.monotonic()


@dataclass
class Phase:
    name: str
    expected: float | None
    start: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def title(self) -> str:
        usual = "" if self.expected is None else f", usually {self.expected:.0f} s"
        return f"{self.name} ({self.elapsed():.0f} s{usual})"


class Progress:
    """Given to everything that takes time; every method may be called from any thread.

    scope: what the durations of phases depend on besides their names, such as the environment.
    stderr: for commands whose standard output is JSON.
    """

    def __init__(self, scope: str = "", *, stderr: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True, stderr=stderr)
        self._durations = Durations(CACHE / "durations.json", scope)
        # Not held while printing: the live line prints with its own lock and then reads the parts.
        self._lock = threading.Lock()
        self._parts: dict[str, str] = {}
        self._phase: Phase | None = None
        self._last_line = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print a line that stays, with the time since the command started."""
        self.line(f"[{time.monotonic() - STARTED:6.1f} s] {text}")

    def line(self, text: str) -> None:
        """Print a line that stays, as it is."""
        self.console.print(text)
        self._last_line = time.monotonic()

    def now(self, part: str, text: str) -> None:
        """Set what a part does now: its task, or a count. Parts run side by side; an empty text ends one."""
        with self._lock:
            if text:
                self._parts[part] = text
            else:
                self._parts.pop(part, None)

    def waiting(self, text: str) -> None:
        """Set what the command waits for, such as a lock; an empty text ends it."""
        if text:
            self(text)
        self.now("waiting", text)

    @contextmanager
    def part(self, name: str, text: str, done: str = "") -> Iterator[None]:
        """A part that lasts as long as the block. done: what a line that stays says then, with the duration."""
        start = time.monotonic()
        self.now(name, text)
        try:
            yield
        finally:
            self.now(name, "")
        if done:
            self(f"  {done} in {time.monotonic() - start:.1f} s")

    @contextmanager
    def polled(self, name: str, read: Callable[[], str], seconds: float = 1.0) -> Iterator[None]:
        """A part whose text a thread reads again and again while the block runs. An empty text changes nothing."""
        end = threading.Event()

        def show() -> None:
            while not end.wait(seconds):
                if (text := read()) and not end.is_set():
                    self.now(name, text)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            self.now(name, "")

    @contextmanager
    def phase(self, name: str, *, quiet: bool = False) -> Iterator[None]:
        """A phase with its start, end and duration, and a current line while it lasts. Phases may be nested.

        quiet: only the current line, for phases that are usually short or have their own lines and estimate.
        """
        outer, phase = self._phase, Phase(name, None if quiet else self._durations.of(name))
        if not quiet:
            self(name)
        self._phase = phase
        try:
            if outer:
                yield
            else:
                with self._shown():
                    yield
        finally:
            self._phase = outer
        if quiet:
            return
        self._durations.learn(name, phase.elapsed())
        self(f"{name}: done in {phase.elapsed():.1f} s")

    @contextmanager
    def _shown(self) -> Iterator[None]:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # Not redirected: rich would wrap the stream that shows control characters, and then write to it.
            with Live(
                get_renderable=self._live,
                console=self.console,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            ):
                yield
            return
        end = threading.Event()
        thread = threading.Thread(target=self._repeat, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _repeat(self, end: threading.Event) -> None:
        while not end.wait(max(0.0, self._last_line + PLAIN_SECONDS - time.monotonic())):
            if time.monotonic() >= self._last_line + PLAIN_SECONDS:
                self("  " + ": ".join(text for text in (self._title(), "; ".join(self.current())) if text))

    def _live(self) -> Text:
        """One line; one more per part where several run side by side."""
        current = self.current()
        title = self._title()
        lines = [f"{title}: {current[0]}"] if len(current) == 1 else [title, *(f"  {text}" for text in current)]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _title(self) -> str:
        return self._phase.title() if self._phase else ""

    def current(self) -> list[str]:
        """What runs now. The name of a part is shown only where several run side by side."""
        with self._lock:
            parts = list(self._parts.items())
        if len(parts) == 1:
            return [parts[0][1]]
        return [text if text.startswith(part) else f"{part}: {text}" for part, text in parts]


class Durations:
    """How long each phase took the last time."""

    def __init__(self, path: Path, scope: str) -> None:
        self.path, self.scope = path, scope

    def _read(self) -> dict[str, float]:
        with suppress(OSError, ValueError):
            content = json.loads(self.path.read_text())
            return {str(name): float(seconds) for name, seconds in content.items()}
        return {}

    def of(self, name: str) -> float | None:
        return self._read().get(f"{self.scope}/{name}")

    def learn(self, name: str, seconds: float) -> None:
        if seconds < LEARN_FROM_SECONDS:
            return
        # A home folder that cannot be written must not stop a deploy.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(self._read() | {f"{self.scope}/{name}": round(seconds, 1)}, indent=1))
