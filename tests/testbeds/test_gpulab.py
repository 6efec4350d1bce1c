"""GPULab: job definitions hold against the CLI's own schema, and the unmodified gpulab-cli runs sets of jobs against a
stand-in server; whatever goes wrong ends in one line with nothing left running or recorded as running.

UPDATE_GOLDEN=1 writes the golden files anew."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standins import gpulab as standin

from cluster.core.errors import InfraError, UserError
from cluster.core.sections import Gpulab
from cluster.providers.gpulab import cli as gpulab_cli
from cluster.providers.gpulab import job_request
from cluster.providers.gpulab.cli import Cli
from cluster.providers.gpulab.gang import Gang, end_all
from cluster.providers.gpulab.ledger import Ledger

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.make_pem(tmp_path_factory.mktemp("pem") / "login.pem")


def settings(pem: Path, **values: Any) -> Gpulab:
    return Gpulab.model_validate(
        {
            **{"project": "horovod", "pem": str(pem), "image": "registry.example.org/horovod/training:1"},
            **{"cluster_id": 4, "start_minutes": 1, "poll_seconds": 0.1, **values},
        }
    )


def rendered(chosen: Gpulab, mode: str, size: int) -> list[dict[str, Any]]:
    shape = job_request.shape(mode, size, gpus=True)
    return job_request.definitions(chosen, "run1", shape, ["python3", "job.py"], {"A": "1"}, "V100", NOW)


@pytest.mark.parametrize(("mode", "size"), [("1xN", 10), ("Nx1", 10), ("Nx1", 2)])
def test_jobs_hold_against_the_clis_own_schema(pem: Path, tmp_path: Path, mode: str, size: int) -> None:
    found = rendered(settings(pem), mode, size)
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
    found = rendered(settings(pem), "Nx1", 2)
    WRONG[field](found[1])
    with pytest.raises(UserError, match=f"run1-01: {field.replace('.', '[.]')}"):
        gpulab_cli.validate(found, tmp_path / "log")


class Place:
    """A stand-in server and a gang that uses it."""

    def __init__(self, lab: standin.Gpulab, chosen: Gpulab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.ledger = Ledger(folder / "jobs.jsonl")
        self.cli = Cli(chosen, folder)
        self.lines: list[str] = []
        self.stop = threading.Event()

    def gang(self) -> Gang:
        return Gang(self.cli, self.ledger, self.lines.append, self.folder / "joblogs", self.stop)

    def run(self, size: int = 2) -> None:
        self.gang().run(rendered(self.cli.settings, "Nx1", size))

    def assert_nothing_left(self) -> None:
        assert self.lab.alive == []
        assert self.ledger.open() == []


@pytest.fixture
def place(
    pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Place]:
    given: dict[str, Any] = getattr(request, "param", {})
    with standin.Gpulab(pem, standin.Script(**given)) as lab:
        for name, value in lab.environment.items():
            monkeypatch.setenv(name, value)
        yield Place(lab, settings(pem), tmp_path)


def test_set_is_held_then_released_together_and_logs_are_kept(place: Place) -> None:
    place.run(2)
    order = [call for call in place.lab.calls if call.startswith(("POST", "PUT"))]
    assert all("hold=true" in call for call in order[:2])
    assert order[2:4] == ["PUT QUEUED"] * 2
    assert "hello from the job" in place.lines
    assert sorted(path.name for path in (place.folder / "joblogs").iterdir()) == [f"run1-0{i}.log" for i in range(2)]
    place.assert_nothing_left()


FAILURES = {
    "FAILED in the queue: Error: no such image": {"fail_in_queue": 1},
    "is being halted to make room": {"halt": 1},
    "FAILED while it ran: ValueError: boom": {"crash": 0},
    "Job submission .* failed": {"submit_status": 500, "submit_error_from": 1},
}


@pytest.mark.parametrize(("message", "place"), list(FAILURES.items()), indirect=["place"], ids=list(FAILURES))
def test_failure_of_one_job_ends_all_with_one_line(place: Place, message: str) -> None:
    with pytest.raises(InfraError, match=message) as caught:
        place.run(2)
    assert "\n" not in str(caught.value)
    place.assert_nothing_left()


@pytest.mark.parametrize("place", [{"submit_status": 403}], indirect=True)
def test_refused_project_is_the_users_to_correct(place: Place) -> None:
    with pytest.raises(UserError, match=r"cluster.gpulab.project: .*403"):
        place.run()
    place.assert_nothing_left()


@pytest.mark.parametrize("place", [{"never_start": 1, "run_seconds": 60}], indirect=True)
def test_set_that_never_starts_whole_is_cancelled(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.cli.settings = place.cli.settings.model_copy(update={"start_minutes": 0.03})
    with pytest.raises(InfraError, match="run1-01 is still QUEUED"):
        place.run()
    place.assert_nothing_left()


@pytest.mark.parametrize("place", [{"broken_polls": 1, "run_seconds": 0.2}], indirect=True)
def test_one_failed_answer_does_not_end_a_set(place: Place) -> None:
    place.run()
    place.assert_nothing_left()


@pytest.mark.parametrize("place", [{"run_seconds": 60}], indirect=True)
def test_stop_cancels_what_runs(place: Place) -> None:
    threading.Timer(4, place.stop.set).start()
    with pytest.raises(InfraError, match="stopped"):
        place.run()
    place.assert_nothing_left()


@pytest.mark.parametrize("place", [{"run_seconds": 60}], indirect=True)
def test_destroy_after_a_kill_finds_jobs_whose_id_was_never_written(place: Place) -> None:
    first, second = rendered(place.cli.settings, "Nx1", 2)
    gang = place.gang()
    gang.submit(first)
    # Killed between being answered and writing the id down: only the name is known.
    place.ledger.asked(second["name"])
    file = place.folder / "second.json"
    file.write_text(json.dumps(second))
    place.cli.submit(file)
    assert len(place.lab.alive) == 2
    end_all(place.cli, Ledger(place.ledger.file))
    place.assert_nothing_left()


def test_expired_certificate_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    old = standin.make_pem(tmp_path / "old.pem", days=-1)
    with pytest.raises(UserError, match=r"cluster.gpulab.pem: the certificate expired on"):
        Cli(settings(old), tmp_path).submit(tmp_path / "any.json")


def test_certificate_others_can_read_is_refused(tmp_path: Path) -> None:
    loose = standin.make_pem(tmp_path / "loose.pem")
    loose.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Cli(settings(loose), tmp_path).submit(tmp_path / "any.json")


def test_no_secret_is_written_anywhere(place: Place, pem: Path) -> None:
    place.run(1)
    secret = pem.read_text().split("PRIVATE KEY-----")[1].strip().splitlines()[3]
    for path in place.folder.rglob("*"):
        if path.is_file():
            assert secret not in path.read_text(errors="replace"), path


def test_locked_certificate_needs_its_password_and_keeps_it(pem: Path, tmp_path: Path) -> None:
    locked = standin.make_pem(tmp_path / "locked.pem", password="correct-horse")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text("wrong")
    with (
        standin.Gpulab(locked, standin.Script(), password="correct-horse") as lab,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in lab.environment.items():
            patch.setenv(name, value)
        used = Cli(settings(locked, password_file=str(file)), tmp_path / "state")
        with pytest.raises(UserError, match=r"cluster.gpulab.password_file"):
            used.mine()
        file.write_text("correct-horse")
        assert used.mine() == {}
    for path in (tmp_path / "state").rglob("*"):
        assert not path.is_file() or "correct-horse" not in path.read_text(errors="replace"), path
