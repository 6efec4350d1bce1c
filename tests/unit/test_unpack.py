"""Archives of other machines write nothing outside the folder, on every supported Python."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from cluster.core.unpack import unpack


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, link, mode
    found.uid = found.gid = 4711
    return found


def unpacked(tmp_path: Path, *members: tarfile.TarInfo) -> tuple[Path, list[str]]:
    data, refused = io.BytesIO(), []
    with tarfile.open(fileobj=data, mode="w") as tar:
        for one in members:
            content = b"text" if one.isreg() else b""
            one.size = len(content)
            tar.addfile(one, io.BytesIO(content))
    data.seek(0)
    (tmp_path / "here").mkdir()
    with tarfile.open(fileobj=data, mode="r|") as tar:
        unpack(tar, tmp_path / "here", refused.append)
    return tmp_path / "here", refused


def test_files_folders_and_links_inside_are_unpacked_as_ours(tmp_path: Path) -> None:
    here, refused = unpacked(
        tmp_path,
        member("out", tarfile.DIRTYPE, mode=0o777),
        member("out/a.pt", mode=0o6777),
        member("out/latest", tarfile.SYMTYPE, "a.pt"),
        member("out/same", tarfile.LNKTYPE, "out/a.pt", mode=0o6777),
    )
    assert refused == []
    assert {path.name: path.read_text() for path in (here / "out").iterdir()} == dict.fromkeys(
        ("a.pt", "latest", "same"), "text"
    )
    found = (here / "out/a.pt").stat()
    assert (found.st_uid, found.st_mode & 0o7777) == (os.getuid(), 0o755)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([member("../evil")], "../evil is outside the folder"),
        ([member("/tmp/../../evil")], "/tmp/../../evil is outside the folder"),
        ([member("best", tarfile.SYMTYPE, "/etc/passwd")], "best is a link to an absolute path"),
        ([member("up", tarfile.SYMTYPE, "../..")], "up is a link to a file outside the folder"),
        ([member("same", tarfile.LNKTYPE, "../secret")], "same is a link to a file outside the folder"),
        ([member("pipe", tarfile.FIFOTYPE)], "pipe is not a file or folder"),
        ([member("disk", tarfile.BLKTYPE)], "disk is not a file or folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_leaves_the_folder_is_left_out_and_named(
    tmp_path: Path, members: list[tarfile.TarInfo], reason: str
) -> None:
    here, refused = unpacked(tmp_path, *members, member("good"))
    assert refused == [reason]
    assert [path.name for path in here.iterdir()] == ["good"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_file_through_a_link_that_was_there_before_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/way").symlink_to(tmp_path / "outside")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(member("way/evil"))
    data.seek(0)
    refused: list[str] = []
    with tarfile.open(fileobj=data) as tar:
        unpack(tar, tmp_path / "there", refused.append)
    assert refused == ["way/evil is outside the folder"] and not list((tmp_path / "outside").iterdir())
