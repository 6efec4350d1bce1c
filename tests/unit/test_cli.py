"""The `bench` command itself: start-up, version, a closed pipe, and what works without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from report_cases import RUNS

import bench

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Each takes longer to import than the help takes to print.
HEAVY = {"altair", "numpy", "pandas", "pydantic", "scipy", "yaml"}


def run(*words: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], stderr=subprocess.PIPE, text=True, timeout=60, **options)


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """Only the two packages, as an installation has them."""
    for name in ("bench", "cluster"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "work").mkdir()
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    done = run(sys.executable, "-X", "importtime", "-m", "bench.cli", *words, stdout=subprocess.PIPE)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & HEAVY
    assert "bench" in done.stdout


def test_package_that_is_copied_to_nodes_imports_nothing_of_ours() -> None:
    code = "import sys, bench; print(sorted(name for name in sys.modules if name.startswith(('bench', 'cluster'))))"
    assert run(sys.executable, "-c", code, stdout=subprocess.PIPE).stdout == "['bench']\n"


def test_help_gives_one_summary_per_command() -> None:
    done = run(BIN / "bench", "--help", stdout=subprocess.PIPE)
    # The columns differ between versions of Python.
    assert "report Write report.html and report.md" in " ".join(done.stdout.split())


def test_version_is_that_of_the_package() -> None:
    assert run(BIN / "bench", "--version", stdout=subprocess.PIPE).stdout == f"bench {bench.__version__}\n"


@pytest.mark.parametrize("words", [["export", RUNS / "engines"], ["explain", RUNS / "engines"], ["--help"]])
def test_closed_pipe_ends_without_a_traceback(words: list[str | Path]) -> None:
    read, write = os.pipe()
    os.close(read)
    # Unbuffered, argparse itself ignores that nobody reads the help.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = run(BIN / "bench", *words, stdout=write, env=buffered)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize("words", ["bench sweep", "bench sweep --dry-run", "bench jupyter", "cluster status"])
def test_command_that_needs_a_checkout_says_so_in_one_line(words: str, packages, tmp_path: Path) -> None:
    name, *rest = words.split()
    done = run(BIN / name, *rest, env=packages, cwd=tmp_path / "work", stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: {tmp_path / 'work'} has no inventories/")
    assert done.stderr.endswith("run it in a checkout of the project\n")
    assert done.stderr.count("\n") == 1


def test_dry_run_needs_environments_only_and_finds_them_from_a_folder_below(packages, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "inventories/local/group_vars", tmp_path / "work/inventories/local/group_vars")
    below = tmp_path / "work/some/folder"
    below.mkdir(parents=True)
    done = run(BIN / "bench", "sweep", "--dry-run", env=packages, cwd=below, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    done = run(BIN / "bench", "sweep", env=packages, cwd=below, stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert f"{tmp_path / 'work'} has no terraform/, roles/;" in done.stderr


def test_timeline_is_read_without_a_checkout(packages, tmp_path: Path) -> None:
    file = RUNS / "horovod-timeline.json"
    done = run(BIN / "bench", "timeline", file, env=packages, cwd=tmp_path / "work", stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert "exposed" in done.stdout


def test_latest_is_looked_for_in_the_working_folder_without_a_checkout(packages, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "compute-ib", tmp_path / "work/results/local/quick")
    code = "import bench; print(bench.__file__, bench.load().name)"
    done = run(sys.executable, "-c", code, env=packages, cwd=tmp_path / "work", stdout=subprocess.PIPE)
    assert done.stdout == f"{tmp_path}/site/bench/__init__.py quick\n", done.stderr


def test_every_data_file_is_packaged() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = [f"{package.replace('.', '/')}/{pattern}" for package, found in patterns.items() for pattern in found]
    listed = run("git", "ls-files", "bench", "cluster", cwd=ROOT, stdout=subprocess.PIPE).stdout.split()
    files = [name for name in listed if not name.endswith(".py")]
    assert len(files) > 10
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in packaged)] == []
