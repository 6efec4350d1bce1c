"""The count of compiled files is shown while the block runs, and its watcher ends with the block."""

from __future__ import annotations

import time

from cluster import compiler


class Shown:
    def __init__(self):
        self.lines, self.texts = [], []

    def __call__(self, text):
        self.lines.append(text)

    def now(self, part, text):
        self.texts.append((part, text))


def test_the_count_is_shown_and_the_end_becomes_a_line():
    shown = Shown()
    # In place of SSH: the script that follows is printed by sh as one word, and the next words are what a node prints.
    login = ["sh", "-c", "printf '3 12\\n12 12\\nend\\n'; sleep 60"]
    with compiler.shown([login], shown):
        deadline = time.monotonic() + 20
        while not shown.lines and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ("horovod", "3 of 12 files compiled") in shown.texts
    assert "Horovod compiled in" in shown.lines[0]
    assert "(12 of 12 files)" in shown.lines[0]
    assert shown.texts[-1] == ("horovod", "")


def test_a_node_that_cannot_be_reached_shows_nothing():
    shown = Shown()
    with compiler.shown([["sh", "-c", "echo no route to host; exit 255"]], shown):
        pass
    assert shown.lines == []
    assert shown.texts == [("horovod", "")]
