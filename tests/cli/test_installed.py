"""The wheel in a clean virtual environment, without a checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from project import BIN, PREDICT, ROOT, RUNS, copy_project, last_line, run


@dataclass
class Installed:
    """The wheel in a venv of its own, outside any checkout."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def run(self, command: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        return run(self.folder / "bin" / command, *words, cwd=cwd)

    def files(self) -> set[Path]:
        return {path for path in self.site_packages.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    tmp = tmp_path_factory.mktemp("wheel")
    made = Installed(tmp / "venv")
    build = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp]
    target = ["--python", made.folder / "bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    run(BIN / "pip", "wheel", *build, copy_project(tmp / "project"), cwd=tmp).check_returncode()
    run(BIN / "python", "-m", "venv", "--without-pip", made.folder, cwd=tmp).check_returncode()
    run(BIN / "pip", *target, *tmp.glob("*.whl"), cwd=tmp).check_returncode()
    # A path in a .pth file makes packages visible but not their .pth files: the editable install stays out of sight.
    site_packages = next((ROOT / ".venv").glob("lib/python3*/site-packages"))
    (made.site_packages / "third-party.pth").write_text(f"{site_packages}\n")
    found = run(made.folder / "bin/python", "-c", "import bench; print(bench.__file__)", cwd=tmp).stdout
    assert found.startswith(str(made.folder)), found
    return made


def test_installed_bench_needs_no_checkout(installed: Installed, tmp_path: Path) -> None:
    copied = shutil.copytree(RUNS / "compute-ib", tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    before = installed.files()
    commands = {
        "--help": ["--help"],
        "predict": PREDICT,
        "plan transfer": ["plan", "transfer", "--dataset-tb", "1"],
        "report": ["report", copied],
        "explain": ["explain", copied],
        "compare": ["compare", copied, copied],
        "export": ["export", copied, "--format", "json"],
        "data make": ["data", "make", "--images", "2", "--out", tmp_path / "data"],
    }
    broken = {}
    for name, words in commands.items():
        done = installed.run("bench", *words, cwd=empty)
        if done.returncode or "Traceback" in done.stderr:
            broken[name] = last_line(done)
    # There is no environment here, which is the only thing that may be wrong.
    done = installed.run("bench", "sweep", "--plan", "quick", "--dry-run", cwd=empty)
    refused = done.returncode == 2 and "environment" in done.stderr and done.stderr.count("\n") == 1
    if done.returncode and not refused:
        broken["sweep --dry-run"] = last_line(done)
    assert not broken, broken
    assert installed.files() == before
    assert list(empty.iterdir()) == []


def test_installed_bench_takes_environments_from_the_current_folder(installed: Installed, tmp_path: Path) -> None:
    # A cluster.yml for AWS is checked against the instance types that come with the package.
    place = tmp_path / "inventories/aws/group_vars/all"
    place.mkdir(parents=True)
    shutil.copy(ROOT / "inventories/aws/group_vars/all/cluster.yml", place)
    (tmp_path / "plan.yml").write_text("{nodes: [1, 2], batches: [32], fabrics: [ena]}")
    done = installed.run("bench", "sweep", "--env", "aws", "--plan", "plan.yml", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, last_line(done)
    assert [one["rate_gbps"] for one in json.loads(done.stdout)["trials"]] == [5, 5]


def test_installed_bench_writes_results_into_the_current_folder(installed: Installed, tmp_path: Path) -> None:
    before = installed.files()
    done = installed.run("bench", "report", RUNS / "compute-ib", RUNS / "straggler", cwd=tmp_path)
    assert done.returncode == 0, last_line(done)
    added = [str(path.relative_to(installed.site_packages)) for path in installed.files() - before]
    assert not added, f"written into site-packages: {', '.join(sorted(added))}"
    assert (tmp_path / "results/side-by-side/report.html").is_file()


def test_installed_bench_brings_the_example(installed: Installed, tmp_path: Path) -> None:
    before = installed.files()
    done = installed.run("bench", "report", "--example", "--json", cwd=tmp_path)
    assert done.returncode == 0, last_line(done)
    assert "On 1G four emulated P100 nodes" in (tmp_path / "results/example/report.md").read_text()
    assert installed.files() == before
