"""A run's folder: where it may be, which plan it belongs to, and what a second sweep keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from project import ENV, Project, last_line


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["../../x", "/tmp/run-outside", "a/b", "..", ".", ".hidden", "x\n", "n" * 5000, "runs", "latest"]
)
def test_run_name_that_is_no_folder_name_exits_2_and_writes_nothing(deployed: Project, name: str) -> None:
    before = set(deployed.folder.parent.rglob("trials.jsonl"))
    done = deployed.run("bench", "sweep", "--env", ENV, f"--run={name}")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), last_line(done)
    assert done.stderr.startswith("bench: --run: ") and len(done.stderr) < 300
    assert not (deployed.folder / "results").exists() and not Path("/tmp/run-outside").exists()
    assert set(deployed.folder.parent.rglob("trials.jsonl")) == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "emulated:v100"}, "plan.device"),
        ({"compute_ms": 100}, "plan.compute_ms"),
        ({"scaling": "strong"}, "plan.scaling"),
    ],
)
def test_another_plan_of_the_same_name_exits_2_and_changes_nothing(
    deployed: Project, changes: dict[str, object], field: str
) -> None:
    assert deployed.sweep().returncode == 1
    before = tree(deployed.results)
    done = deployed.sweep(**changes)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), last_line(done)
    assert field in done.stderr and "--run NAME" in done.stderr and "--fresh" in done.stderr
    assert tree(deployed.results) == before


def test_plan_with_more_points_another_title_and_defaults_written_out_is_the_same_plan(deployed: Project) -> None:
    assert deployed.sweep().returncode == 1
    links = {"ten": {"rate_gbps": 10}}
    same = {"title": "again", "launcher": "usual", "seconds": 20, "links": links}
    assert deployed.sweep(batches=[32, 64], fabrics=["1g", "ten"], **same).returncode == 1
    assert {(trial["point"]["fabric"], trial["point"]["batch"]) for trial in deployed.trials()} == {
        (fabric, batch) for fabric in ("1g", "ten") for batch in (32, 64)
    }
    assert json.loads((deployed.results / "plan.json").read_text())["batches"] == [32, 64]
    done = deployed.sweep(fabrics=["ten"], links={"ten": {"rate_gbps": 25}})
    assert done.returncode == 2 and "plan.links.ten" in done.stderr


def test_folder_with_trials_and_a_damaged_plan_is_left_alone(deployed: Project) -> None:
    assert deployed.sweep().returncode == 1
    (deployed.results / "plan.json").write_text('{"nodes": [2], "batc')
    done = deployed.sweep()
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), last_line(done)
    assert "plan.json: not JSON" in done.stderr and "--fresh" in done.stderr


def test_second_sweep_keeps_the_provenance_of_the_trials_that_are_there(deployed: Project) -> None:
    assert deployed.sweep().returncode == 1
    first = (deployed.results / "provenance.json").read_bytes()
    # The same environment again adds no second file.
    assert deployed.sweep(batches=[32, 64]).returncode == 1
    assert {trial["provenance"] for trial in deployed.trials()} == {"provenance.json"}
    state = deployed.folder / ".state" / ENV / "terraform.tfstate"
    content = json.loads(state.read_text())
    content["outputs"]["cluster"]["value"]["fabrics"]["1g"]["interface"] = "fabric9"
    state.write_text(json.dumps(content))
    assert deployed.sweep(batches=[96]).returncode == 1
    assert (deployed.results / "provenance.json").read_bytes() == first
    later = json.loads((deployed.results / "provenance-2.json").read_text())
    assert later["fabrics"]["1g"]["interface"] == "fabric9"
    named = {trial["point"]["batch"]: trial["provenance"] for trial in deployed.trials()}
    assert named == {32: "provenance.json", 64: "provenance.json", 96: "provenance-2.json"}
    done = deployed.run("bench", "report", deployed.results)
    assert "different environments (provenance.json, provenance-2.json): fabrics.1g" in done.stderr


def test_dry_run_lists_no_two_rows_that_look_the_same(deployed: Project) -> None:
    plan = {"nodes": [2], "batches": [32], "fabrics": ["1g"], "repeats": 2, "data": ["shards:/a", "shards:/b"]}
    (deployed.tmp / "plan.yml").write_text(json.dumps(plan))
    done = deployed.run("bench", "sweep", "--env", ENV, "--plan", deployed.tmp / "plan.yml", "--dry-run")
    assert done.returncode == 0, last_line(done)
    rows = [line for line in done.stdout.splitlines() if line.startswith("horovod")]
    assert len(rows) == len(set(rows)) == 4
