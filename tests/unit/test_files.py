"""Files that people edit: a bad one gives one line with its label, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan import schema
from cluster import tuning
from cluster.core import config, files
from cluster.core.errors import UserError

BAD = {
    "a.yml": (b"a: [1", "label: not YAML: "),
    "b.yml": (b"when: 2024-13-45", "label: not YAML: month must be in 1..12"),
    "c.yml": (b"- 1", "label: not a mapping of names to values, but list"),
    "d.yml": (b"", "label: not a mapping of names to values, but NoneType"),
    "e.yml": (b"name: \xff", "label: not UTF-8: byte 6 is 0xff"),
    "f.json": (b"{", "label: not JSON: "),
    "g.json": (b"[1]", "label: not a mapping of names to values, but list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_one_line_with_its_label(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        files.mapping(tmp_path / name, "label")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_label_of_a_missing_file_is_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^none\.yml: missing$"):
        files.text(tmp_path / "none.yml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        files.text(tmp_path)


def test_every_reader_of_a_users_file_reports_bytes_that_are_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.yml"
    path.write_bytes(b"\xff\xfe")
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr(tuning, "file", lambda env: path)
    for read in (lambda: config.read(path), lambda: schema.load(str(path)), lambda: tuning.load("local")):
        with pytest.raises(UserError, match=r"^bad\.yml: not UTF-8"):
            read()
