"""Counts of packages and compiled files are shown while the block runs, and the watchers end with the block."""

from __future__ import annotations

import time

from cluster import background


class Shown:
    def __init__(self):
        self.lines, self.texts = [], []

    def __call__(self, text):
        self.lines.append(text)

    def now(self, part, text):
        self.texts.append((part, text))


def test_the_count_is_shown_and_the_end_becomes_a_line():
    shown = Shown()
    # In place of SSH: prints what the script prints on a node. The script itself becomes an argument that sh ignores.
    login = ["sh", "-c", "printf 'apt 7 150\\nhorovod 3 12 500\\nhorovod 12 12 0\\nend\\n'; exec sleep 60"]
    with background.shown([login], shown):
        deadline = time.monotonic() + 20
        while not shown.lines and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ("apt", "7 packages fetched, 150 installed") in shown.texts
    assert ("horovod", "3 of 12 files compiled, compiler uses 500 MB") in shown.texts
    assert "Horovod compiled in" in shown.lines[0]
    assert "(12 of 12 files)" in shown.lines[0]
    assert shown.texts[-2:] == [("apt", ""), ("horovod", "")]


def test_a_node_that_cannot_be_reached_shows_nothing():
    shown = Shown()
    with background.shown([["sh", "-c", "echo no route to host; exit 255"]], shown):
        pass
    assert shown.lines == []
    assert not any(text for _, text in shown.texts)
