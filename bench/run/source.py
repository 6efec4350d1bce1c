"""The folder that a run copies: which files, how large, and whether the script is in it."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from pathspec import GitIgnoreSpec

from cluster.core import files
from cluster.core.errors import UserError

IGNORE_FILES = (".runignore", ".gitignore")
NEVER = (".git/", ".venv/", "__pycache__/")
WARN_BYTES = 200 << 20


def ignored(folder: Path) -> GitIgnoreSpec:
    """The patterns of .runignore, or else of .gitignore, and what no run needs."""
    found = next((path for name in IGNORE_FILES if (path := folder / name).is_file()), None)
    lines = files.text(found).splitlines() if found else []
    return GitIgnoreSpec.from_lines([*lines, *NEVER])


def to_copy(folder: Path) -> Iterator[Path]:
    """The files to copy, relative to the folder."""
    spec = ignored(folder)
    for where, folders, names in os.walk(folder):
        here = Path(where).relative_to(folder)
        folders[:] = sorted(name for name in folders if not spec.match_file(f"{here / name}/"))
        # os.walk does not follow links to folders.
        links = [name for name in folders if (folder / here / name).is_symlink()]
        yield from (here / name for name in sorted([*names, *links]) if not spec.match_file(str(here / name)))


def links_out(folder: Path, chosen: Sequence[Path], share: str) -> list[tuple[Path, str]]:
    """Links that lead out of the folder, and where to. They are copied as links, and the nodes have only the share."""
    links = [(path, os.path.realpath(folder / path)) for path in chosen if (folder / path).is_symlink()]
    return [(path, to) for path, to in links if not any(Path(to).is_relative_to(place) for place in (folder, share))]


def size(folder: Path, chosen: Sequence[Path]) -> int:
    return sum((folder / path).lstat().st_size for path in chosen)


def write(folder: Path, chosen: Sequence[Path], out: IO[bytes]) -> None:
    """A tar of the files. Not rsync: each run has a new folder, so there is nothing to compare with."""
    with tarfile.open(fileobj=out, mode="w|gz") as tar:
        for path in chosen:
            tar.add(folder / path, str(path), recursive=False)


def check_words(folder: Path, words: Sequence[str]) -> None:
    """Refuse a script that is not in the folder: every rank would fail on it."""
    # `make run` without SCRIPT gives python an empty word.
    if not words or list(words[1:]) == [""]:
        example = "`bench run -- python train.py` or `make run SCRIPT=train.py`"
        raise UserError(f"COMMAND: missing; write it after --, as in {example}")
    script = next((word for word in words[1:] if not word.startswith("-")), None)
    if Path(words[0]).name.startswith("python"):
        if script and script.endswith(".py") and words[1] == script and not (folder / script).is_file():
            raise UserError(f"{script}: no such file in {folder}; give its folder with --folder")
        if script and Path(script).is_absolute() and words[1] == script:
            raise UserError(f"{script}: write it relative to the folder that is copied ({folder})")
    elif words[0].endswith(".py"):
        raise UserError(f"{words[0]}: write `python {words[0]}`")
