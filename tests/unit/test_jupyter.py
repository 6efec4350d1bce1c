"""`bench jupyter`: JupyterLab on loopback, behind a token that only the owner can read."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from report_cases import RUNS

from bench import jupyter

BENCH = Path(sys.executable).with_name("bench")


def get(port: int, token: str | None) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/contents/")
    if token:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_lab_shows_the_notebook_to_who_has_the_token(port: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        lab = subprocess.Popen([BENCH, "jupyter", RUNS / "engines", "--port", str(port)], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 90
        while True:
            assert lab.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.3)
        assert jupyter.LINK.stat().st_mode & 0o777 == 0o600
        token = parse_qs(urlsplit(jupyter.LINK.read_text().strip()).query)["token"][0]
        assert get(port, None)[0] == 403
        assert get(port, "wrong")[0] == 403
        status, text = get(port, token)
        assert status == 200
        assert "scaling.ipynb" in {entry["name"] for entry in json.loads(text)["content"]}
        assert token not in log.read_text()
    finally:
        lab.send_signal(signal.SIGTERM)
        lab.wait(timeout=60)
    assert not jupyter.LINK.exists()


def test_port_that_is_taken_is_named(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        done = subprocess.run([BENCH, "jupyter", RUNS / "engines", "--port", str(port)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"bench: --port {port}:")
    assert done.stderr.count("\n") == 1
