"""How `bench` and `cluster` end: one line and an exit code, whatever went wrong."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
from pathlib import Path

import pytest
from report_cases import RUNS
from rich.table import Table

from bench import cli as bench_cli
from cluster import cli as cluster_cli
from cluster.core import entry, printable
from cluster.core.errors import InfraError, UserError
from cluster.core.terminal import Console

PLANS = ("cluster", "network", "datapath", "training-time", "time-to-accuracy", "transfer")
ACTIONS = ("make", "shard", "verify", "push", "bench")
BENCH = [*bench_cli.COMMANDS, *(f"plan {name}" for name in PLANS), *(f"data {name}" for name in ACTIONS)]


def commands(parser: argparse.ArgumentParser) -> list[str]:
    return [name for a in parser._actions if isinstance(a, argparse._SubParsersAction) for name in a.choices]


@pytest.mark.parametrize("words", ["", *BENCH])
def test_wrong_word_gives_one_line_and_a_pointer_to_the_help_of_bench(words: str, capsys) -> None:
    assert bench_cli.main([*words.split(), "--nosuch"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(r"; see `bench( [a-z -]+)? --help`\n$", err)


@pytest.mark.parametrize("name", commands(cluster_cli.make_parser()))
def test_wrong_word_gives_one_line_and_a_pointer_to_the_help_of_cluster(name: str, capsys) -> None:
    assert cluster_cli.main([name, "--nosuch"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith("--help`\n")


def test_two_dashes_are_not_a_value(capsys) -> None:
    assert bench_cli.main(["plan", "transfer", "--dataset-tb=--"]) == 2
    assert capsys.readouterr().err.startswith("bench: --dataset-tb: ")


def raises(error: BaseException):
    def command() -> int:
        raise error

    return command


CALL = subprocess.CalledProcessError(4, ["ssh-keygen", "-q"], stderr="first\nno entropy\n")
ENDS = {
    "user": (UserError("nodes: too many"), 2, "x: nodes: too many"),
    "infra": (InfraError("disk"), 3, "x: disk"),
    "interrupt": (KeyboardInterrupt(), 130, "x: interrupted"),
    "permission": (PermissionError(13, "Permission denied", "/a/b"), 3, "x: /a/b: Permission denied"),
    "full": (OSError(28, "No space left on device", "/a"), 3, "x: /a: the disk is full; make room and run the same"),
    "program": (FileNotFoundError(2, "No such file", "mpirun"), 3, "x: mpirun: not found; if it is a program, run"),
    "called": (CALL, 3, "x: ssh-keygen failed (exit 4): no entropy"),
    "lines": (UserError("a\nb\x1b[31m" + "c" * 10**7), 2, "x: a b\\x1b[31mccc"),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_error_is_one_short_line_and_an_exit_code(name: str, capsys) -> None:
    error, code, text = ENDS[name]
    assert entry.guard("x", raises(error)) == code
    err = capsys.readouterr().err
    assert err.startswith(text)
    assert err.count("\n") == 1
    assert len(err) < 2000
    assert "\x1b" not in err


def test_bug_is_one_line_that_names_the_file_with_its_traceback(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert entry.guard("x", raises(KeyError("a\nb"))) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    (file,) = tmp_path.iterdir()
    assert err == f"x: this is a bug: KeyError: 'a\\nb'; please report it with {file}\n"
    assert "Traceback" in file.read_text()


def test_bug_on_a_full_disk_is_still_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert entry.guard("x", raises(KeyError("a"))) == 3
    assert capsys.readouterr().err == "x: this is a bug: KeyError: 'a'; please report it\n"


def test_escape_sequences_of_a_trial_do_not_reach_the_terminal(tmp_path: Path, capsys) -> None:
    text = (RUNS / "network-1g/trials.jsonl").read_text()
    assert '"model":"resnet50"' in text
    changed = text.replace('"model":"resnet50"', '"model":"\\u001b]0;title\\u0007\\u001b[2Jred"')
    (tmp_path / "trials.jsonl").write_text(changed)
    for words in (["explain"], ["export"], ["compare", str(tmp_path)]):
        bench_cli.main([*words, str(tmp_path)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b" in out


def test_tables_show_escape_sequences_and_keep_their_own_colours() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=60)
    table = Table("a", title="\x1b[2J")
    table.add_row("[red]ok[/red] \x1b]0;title\x07")
    screen.print(table)
    screen.print("\x1b[2J")
    text = screen.file.getvalue()
    assert "\x1b[31mok" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text


def test_only_the_terminal_module_uses_the_console_of_rich() -> None:
    root = Path(__file__).parents[2]
    sources = [path for name in ("bench", "cluster") for path in (root / name).rglob("*.py")]
    found = [path.name for path in sources if "from rich.console import Console" in path.read_text()]
    assert found == ["terminal.py"]


def test_printable_keeps_tabs_lines_and_letters() -> None:
    assert printable.printable("é\t1\n\x00\x1b\x9b\r") == "é\t1\n\\x00\\x1b\\x9b\\x0d"
