"""GPULab: job definitions pass the CLI's own schema, and the unmodified gpulab-cli runs sets of jobs on a stand-in
server. Every failure ends in a one-line error, and no job keeps running or stays open in the ledger.

UPDATE_GOLDEN=1 rewrites the golden files."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standins import gpulab as standin

from cluster.core import sections, worker_files
from cluster.core.errors import InfraError, UserError
from cluster.providers.gpulab import cli as gpulab_cli
from cluster.providers.gpulab import job_request
from cluster.providers.gpulab.cli import Cli
from cluster.providers.gpulab.gang import Gang, cancel_open_jobs
from cluster.providers.ledger import Ledger

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.make_pem(tmp_path_factory.mktemp("pem") / "login.pem")


def make_section(pem: Path, **values: Any) -> sections.Gpulab:
    return sections.Gpulab.model_validate(
        {
            **{"project": "horovod", "pem": str(pem), "image": "registry.example.org/horovod/training:1"},
            **{"cluster_id": 4, "start_minutes": 1, "poll_seconds": 0.1, **values},
        }
    )


def definitions(section: sections.Gpulab, mode: str, size: int) -> list[dict[str, Any]]:
    shape = job_request.choose_shape(mode, size, gpus=True)
    return job_request.definitions(section, "run1", shape, ["python3", "job.py"], {"A": "1"}, "V100", NOW)


@pytest.mark.parametrize(("mode", "size"), [("1xN", 10), ("Nx1", 10), ("Nx1", 2)])
def test_jobs_pass_the_schema_of_the_cli(pem: Path, tmp_path: Path, mode: str, size: int) -> None:
    found = definitions(make_section(pem), mode, size)
    gpulab_cli.validate(found, tmp_path / "log")
    assert len(found) == (1 if mode == "1xN" else size)
    assert sum(job["request"]["resources"]["gpus"] for job in found) == size
    text = json.dumps(found, indent=1) + "\n"
    golden = GOLDEN / f"jobs-{mode}-{size}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


WRONG = {
    "request.resources.gpus": lambda job: job["request"]["resources"].update(gpus=-1),
    "request.resources.gpuModels": lambda job: job["request"]["resources"].update(gpuModels=["V100"]),
    "request.docker.image": lambda job: job["request"]["docker"].update(image="not an image"),
    "request.scheduling.maxDuration": lambda job: job["request"]["scheduling"].update(maxDuration="soon"),
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_field_is_named_before_anything_is_submitted(pem: Path, tmp_path: Path, field: str) -> None:
    found = definitions(make_section(pem), "Nx1", 2)
    WRONG[field](found[1])
    with pytest.raises(UserError, match=f"run1-01: {field.replace('.', '[.]')}"):
        gpulab_cli.validate(found, tmp_path / "log")


class Harness:
    """A stand-in server and the objects that talk to it."""

    def __init__(self, server: standin.GpulabServer, section: sections.Gpulab, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.ledger = Ledger(folder / "jobs.jsonl")
        self.cli = Cli(section, folder)
        self.lines: list[str] = []
        self.stop = threading.Event()

    def gang(self) -> Gang:
        return Gang(self.cli, self.ledger, self.lines.append, self.folder / "joblogs", self.stop)

    def run(self, size: int = 2) -> None:
        self.gang().run(definitions(self.cli.section, "Nx1", size))

    def assert_nothing_left(self) -> None:
        assert self.server.alive == []
        assert self.ledger.open() == {}


@pytest.fixture
def harness(
    pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    given: dict[str, Any] = getattr(request, "param", {})
    with standin.GpulabServer(pem, standin.Script(**given)) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield Harness(server, make_section(pem), tmp_path)


def test_jobs_are_submitted_on_hold_and_released_together_and_logs_are_kept(harness: Harness) -> None:
    harness.run(2)
    order = [call for call in harness.server.calls if call.startswith(("POST", "PUT"))]
    assert all("hold=true" in call for call in order[:2])
    assert order[2:4] == ["PUT QUEUED"] * 2
    assert "hello from the job" in harness.lines
    assert sorted(path.name for path in (harness.folder / "joblogs").iterdir()) == [f"run1-0{i}.log" for i in range(2)]
    harness.assert_nothing_left()


FAILURES = {
    "FAILED in the queue: Error: no such image": {"fail_in_queue": 1},
    "is being halted to make room": {"halt": 1},
    "FAILED while it ran: ValueError: boom": {"crash": 0},
    "Job submission .* failed": {"submit_status": 500, "submit_error_from": 1},
}


@pytest.mark.parametrize(("message", "harness"), list(FAILURES.items()), indirect=["harness"], ids=list(FAILURES))
def test_failure_of_one_job_ends_all_with_a_one_line_error(harness: Harness, message: str) -> None:
    with pytest.raises(InfraError, match=message) as caught:
        harness.run(2)
    assert "\n" not in str(caught.value)
    harness.assert_nothing_left()


@pytest.mark.parametrize("harness", [{"submit_status": 403}], indirect=True)
def test_refused_project_is_a_user_error(harness: Harness) -> None:
    with pytest.raises(UserError, match=r"cluster.gpulab.project: .*403"):
        harness.run()
    harness.assert_nothing_left()


@pytest.mark.parametrize("harness", [{"never_start": 1, "run_seconds": 60}], indirect=True)
def test_set_that_does_not_start_completely_is_cancelled(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.cli.section = harness.cli.section.model_copy(update={"start_minutes": 0.03})
    with pytest.raises(InfraError, match="run1-01 is still QUEUED"):
        harness.run()
    harness.assert_nothing_left()


@pytest.mark.parametrize("harness", [{"broken_polls": 1, "run_seconds": 0.2}], indirect=True)
def test_one_failed_poll_does_not_end_a_set(harness: Harness) -> None:
    harness.run()
    harness.assert_nothing_left()


@pytest.mark.parametrize("harness", [{"run_seconds": 60}], indirect=True)
def test_stop_cancels_running_jobs(harness: Harness) -> None:
    threading.Timer(4, harness.stop.set).start()
    with pytest.raises(InfraError, match="stopped"):
        harness.run()
    harness.assert_nothing_left()


@pytest.mark.parametrize("harness", [{"run_seconds": 60}], indirect=True)
def test_destroy_after_a_kill_finds_jobs_whose_id_was_not_written(harness: Harness) -> None:
    first, second = definitions(harness.cli.section, "Nx1", 2)
    gang = harness.gang()
    gang.submit(first)
    # Killed after GPULab answered and before the id was written: only the name is known.
    harness.ledger.add("asked", second["name"])
    file = harness.folder / "second.json"
    file.write_text(json.dumps(second))
    harness.cli.submit(file)
    assert len(harness.server.alive) == 2
    cancel_open_jobs(harness.cli, Ledger(harness.ledger.file))
    harness.assert_nothing_left()


def test_expired_certificate_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    old = standin.make_pem(tmp_path / "old.pem", days=-1)
    with pytest.raises(UserError, match=r"cluster.gpulab.pem: the certificate expired on"):
        Cli(make_section(old), tmp_path).submit(tmp_path / "any.json")


def test_certificate_that_others_can_read_is_refused(tmp_path: Path) -> None:
    loose = standin.make_pem(tmp_path / "loose.pem")
    loose.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Cli(make_section(loose), tmp_path).submit(tmp_path / "any.json")


def test_no_secret_is_written_to_the_state_folder(harness: Harness, pem: Path) -> None:
    harness.run(1)
    secret = pem.read_text().split("PRIVATE KEY-----")[1].strip().splitlines()[3]
    for path in harness.folder.rglob("*"):
        if path.is_file():
            assert secret not in path.read_text(errors="replace"), path


def test_password_of_a_locked_certificate_is_required_and_never_written(pem: Path, tmp_path: Path) -> None:
    locked = standin.make_pem(tmp_path / "locked.pem", password="correct-horse")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text("wrong")
    with (
        standin.GpulabServer(locked, standin.Script(), password="correct-horse") as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment.items():
            patch.setenv(name, value)
        cli = Cli(make_section(locked, password_file=str(file)), tmp_path / "state")
        with pytest.raises(UserError, match=r"cluster.gpulab.password_file"):
            cli.own_jobs()
        file.write_text("correct-horse")
        assert cli.own_jobs() == {}
    for path in (tmp_path / "state").rglob("*"):
        assert not path.is_file() or "correct-horse" not in path.read_text(errors="replace"), path


def test_worker_that_jobs_start_is_in_the_training_image() -> None:
    with tarfile.open(fileobj=io.BytesIO(worker_files.archive())) as tar:
        assert f"{worker_files.digest()}/bench/worker/gpulab_job.py" in tar.getnames()


def test_ledger_lists_open_jobs_even_if_its_last_line_is_cut_off(tmp_path: Path) -> None:
    events = [("asked", "a"), ("submitted", "a"), ("asked", "b"), ("asked", "c"), ("submitted", "c"), ("ended", "c")]
    lines = [json.dumps({"event": event, "name": name, "id": f"id-{name}"}) for event, name in events]
    (tmp_path / "jobs.jsonl").write_text("\n".join([*lines, '{"event": "subm']))
    assert Ledger(tmp_path / "jobs.jsonl").open() == {"a": "id-a", "b": ""}
