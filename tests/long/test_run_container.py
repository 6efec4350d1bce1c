"""bench run --container on two nodes: the image's programs run, with the share, the variables and the ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e")]

import environments  # noqa: E402
from environments import BIN, ROOT, podman, run  # noqa: E402

ENV = "runcontainer"
IMAGE = "localhost/horovod-cluster-run-busybox:1"
SECRET = "c0ffee-secret"
SHOW = """
echo "rank $RANK of $WORLD_SIZE token ${#TOKEN} has $(/busybox ls / | /busybox head -n 1)"
/busybox cat code.txt
echo $RANK > $RUN_OUTPUT/$RANK
"""
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", autouse=True)
def deployed(tmp_path_factory):
    """The image contains one program of this machine, so no registry is needed."""
    folder = tmp_path_factory.mktemp("image")
    subprocess.run(["apt-get", "download", "busybox-static"], cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    run("dpkg-deb", "-x", package, folder)
    (folder / "Containerfile").write_text("FROM scratch\nCOPY --chmod=755 bin/busybox /busybox\n")
    run("podman", "build", "--quiet", "--tag", IMAGE, "--file", folder / "Containerfile", folder)
    run("podman", "save", "--quiet", "--output", folder / "image.tar", IMAGE)
    run("podman", "rmi", IMAGE)
    environments.remove(ENV)
    made = environments.make_env(ENV, 79, 2)
    path = made / "group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    content["cluster"].setdefault("features", {})["containers"] = True
    path.write_text(yaml.safe_dump(content | {"containers_image": f"archive:{folder}/image.tar"}))
    environments.cluster("deploy", env=ENV)
    yield
    environments.remove(ENV)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "code.txt").write_text("copied\n")
    return tmp_path


def words(folder: Path, script: str) -> list[str]:
    chosen = ["--env", ENV, "--env", f"TOKEN={SECRET}", "--folder", str(folder), "--container", IMAGE, "--all-ranks"]
    return [str(BIN / "bench"), "run", *chosen, "--", "/busybox", "sh", "-c", script]


def test_ranks_run_in_the_image_with_the_share_and_the_variables(folder):
    done = run(*words(folder, SHOW))
    for rank in (0, 1):
        assert f"[{rank}] rank {rank} of 2 token {len(SECRET)} has busybox" in done.stdout, done.stdout
        assert f"[{rank}] copied" in done.stdout
    run(BIN / "bench", "runs", "fetch", "latest", "--env", ENV)
    last = sorted((ROOT / "results" / ENV / "runs").iterdir())[-1]
    assert sorted(path.name for path in (last / "out").iterdir()) == ["0", "1"]
    assert json.loads((last / "end.json").read_text())["state"] == "ok"


def test_exit_code_of_the_program_in_the_image_is_the_ranks(folder):
    done = run(*words(folder, "[ $RANK = 0 ] || exit 7; /busybox sleep 60"), ok=False)
    assert done.returncode == 1 and "rank 1 on w1 failed first (exit code 7)" in done.stderr, done.stderr


def test_interrupt_ends_every_container_on_every_node(folder):
    look = "pgrep -af '[b]usybox sleep 4321'; runuser -u horovod -- podman ps --quiet"
    process = subprocess.Popen(words(folder, "/busybox sleep 4321"), cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not all("sleep" in podman("exec", f"{ENV}-{node}", "sh", "-c", look) for node in ("head", "w1")):
        assert process.poll() is None and time.monotonic() < deadline, "the containers did not start"
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)
    deadline = time.monotonic() + 30
    while any(podman("exec", f"{ENV}-{node}", "sh", "-c", look) for node in ("head", "w1")):
        assert time.monotonic() < deadline, "a container is left"
        time.sleep(0.5)
    left = f"grep -rlsF {SECRET} /home /run /var /tmp /shared/runs; runuser -u horovod -- podman ps --all --quiet"
    assert [left_on(node, left) for node in ("head", "w1")] == ["", ""]


def left_on(node: str, command: str) -> str:
    """What is left a few seconds after the end."""
    deadline = time.monotonic() + 20
    while (found := podman("exec", f"{ENV}-{node}", "sh", "-c", command)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found
