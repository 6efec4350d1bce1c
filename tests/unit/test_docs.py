"""The documents: what they name exists, every page is linked, and the front page's picture is of today's report."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.report.command import EXAMPLE
from cluster.core.config import ROOT

FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# The changelog names what is gone, so only its links are checked.
LINKED = [*FRONT, *PAGES, ROOT / "CHANGELOG.md"]
FOLDERS = "ansible|bench|bin|cluster|containers|docs|examples|inventories|notebooks|requirements|roles|terraform|tests"
# Written by commands, not committed.
MADE = {"inventories/<env>/tuning.yml", "inventories/baremetal/known_hosts.txt"}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def code(text: str) -> list[str]:
    """Code spans and indented lines, without their comments."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return [line.partition(" #")[0].strip() for line in spans + re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)]


def links(path: Path) -> list[str]:
    text = path.read_text()
    found = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    return [target for target in found if "://" not in target]


def named_paths(text: str) -> set[str]:
    text = re.sub(r"https?://\S+", "", text)
    found = re.findall(rf"(?<![\w/.<>-])((?:{FOLDERS})/[\w./*<>-]*[\w*>])", text)
    return set(found) - MADE


@pytest.mark.parametrize("page", names([*FRONT, *PAGES]))
def test_every_path_named_on_a_page_exists(page: str) -> None:
    paths = named_paths((ROOT / page).read_text())
    missing = [path for path in sorted(paths) if not list(ROOT.glob(re.sub(r"<\w+>", "*", path)))]
    assert not missing


@pytest.mark.parametrize("page", names(LINKED))
def test_every_link_on_a_page_leads_somewhere(page: str) -> None:
    broken = [target for target in links(ROOT / page) if not ((ROOT / page).parent / target).exists()]
    assert not broken


def test_every_page_is_linked_from_the_index_and_the_front_page() -> None:
    index = {(ROOT / "docs" / target).resolve() for target in links(ROOT / "docs/README.md")}
    front = {(ROOT / target).resolve() for target in links(ROOT / "README.md")}
    assert not [page.name for page in PAGES if page.name != "README.md" and page not in index]
    assert not [page.name for page in PAGES if page not in front]


@pytest.mark.parametrize("page", names([*FRONT, *PAGES]))
def test_every_make_target_on_a_page_exists(page: str) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = code((ROOT / page).read_text())
    wanted = {word for line in lines for found in re.findall(r"^make((?: [a-z-]+)+)", line) for word in found.split()}
    assert wanted <= known


def test_pages_and_messages_write_plain_bench_and_cluster() -> None:
    """`. bin/env` puts them on PATH; README.md says so."""
    assert ". bin/env" in (ROOT / "README.md").read_text()
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.ipynb", "bench/*.py", "cluster/*.py"], cwd=ROOT, capture_output=True, text=True
    )
    old = re.compile(r"\.venv/bin/(bench|cluster)\b")
    assert [path for path in listed.stdout.split() if old.search((ROOT / path).read_text())] == []


def test_env_puts_bench_and_cluster_on_the_path() -> None:
    found = subprocess.run(
        ["bash", "-c", ". bin/env; command -v bench cluster"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(ROOT / ".venv/bin" / name) for name in ("bench", "cluster")]


def test_the_map_in_contributing_names_what_is_in_the_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (.*\?) \| `(.*?)` \| (.*) \|$", text, re.MULTILINE)
    asked = " ".join(question for question, _, _ in rows)
    for subject in ("ranks per node", "renders the RSpec", "writes a trial", "the interface", "words the verdict"):
        assert subject in asked
    for question, path, answer in rows:
        for name in re.findall(r"`([\w.]+)`", answer):
            word = name.rpartition(".")[2]
            assert re.search(rf"\b{word}\b", (ROOT / path).read_text()), f"{question} {path} has no {name}"


def test_pre_commit_hooks_call_tools_of_the_project() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        assert shutil.which(ROOT / hook["entry"].split()[0]), hook["entry"]


def test_workflows_call_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    called = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            called |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
            steps = [step.get("run", "") for step in job["steps"]]
            called |= {step.removeprefix("make ") for step in steps if re.fullmatch(r"make [a-z-]+", step)}
    assert called == {"check", "test", "test-terraform"}
    assert all(f"\n{target}: setup ##" in makefile for target in called)


def test_a_changed_run_makes_picture_and_verdict_stale(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import picture
html, verdict = picture.example()
pictures = list(picture.PICTURES)
assert all(picture.shows(path) == picture.digest(html) for path in pictures), "stale; run: make docs"
picture.RUN = Path(sys.argv[1])
changed, other = picture.example()
assert all(picture.shows(path) != picture.digest(changed) for path in pictures)
assert other != verdict
"""
    run = tmp_path / "quick"
    shutil.copytree(EXAMPLE, run)
    trials = (run / "trials.jsonl").read_text().splitlines()
    (run / "trials.jsonl").write_text("\n".join(line for line in trials if '"fabric":"10g"' not in line) + "\n")
    done = subprocess.run([sys.executable, "-c", program, run], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("code", [1, 2, 3, 130])
def test_make_prints_the_exit_code_of_a_command_as_the_readme_says(tmp_path: Path, code: int) -> None:
    (tmp_path / "cluster").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "cluster").chmod(0o755)
    argv = ["make", "-o", "setup", f"VENV={tmp_path}", "status"]
    # Not as a part of the make that runs the tests.
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    last = re.sub(r"Makefile:\d+: ", "Makefile: ", done.stderr.splitlines()[-1])
    assert (done.returncode, last) == (2, f"make: *** [Makefile: status] Error {code}")
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "`make` itself always ends with 2" in readme
    assert last.replace(f"Error {code}", "Error 1") in readme
