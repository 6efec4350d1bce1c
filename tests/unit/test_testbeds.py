"""What GPULab and the Virtual Wall share, and the commands of the Virtual Wall, without a testbed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.core import config, errors
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.providers import testbed
from cluster.providers.virtualwall import control_planes, experiment
from cluster.providers.virtualwall.provider import VirtualWall
from cluster.providers.virtualwall.rspec import Login


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Error: no such image\nbye\n", "Error: no such image"),
        ("warning\nValueError: boom\n\n", "ValueError: boom"),
        ("first\nlast\n", "last"),
        ("", ""),
    ],
)
def test_error_line_is_the_one_that_explains_the_failure(output: str, line: str) -> None:
    assert testbed.error_line(output) == line


@pytest.mark.parametrize("kind", [UserError, InfraError])
def test_error_of_a_provisioner_reaches_the_user_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[UserError | InfraError]
) -> None:
    def fail() -> None:
        raise kind("cluster.gpulab.pem: wrong")

    assert testbed.run_tool(fail, tmp_path) == 1
    assert capsys.readouterr().err == "fatal: cluster.gpulab.pem: wrong\n"
    passed_on = errors.take(tmp_path)
    assert isinstance(passed_on, kind)
    assert str(passed_on) == "cluster.gpulab.pem: wrong"
    assert testbed.run_tool(lambda: None, tmp_path) == 0
    assert errors.take(tmp_path) is None


def run_python(code: str, folder: Path, seconds: float = 30, secret: str | None = None) -> str:
    return control_planes.run_command([sys.executable, "-c", code], folder / "logs/tool.log", seconds, secret)


def test_output_of_a_tool_is_logged_without_the_password(tmp_path: Path) -> None:
    code = "import sys; print('password:', 'correct-' + 'horse'); print('on stderr', file=sys.stderr)"
    assert run_python(code, tmp_path, secret="correct-horse").splitlines() == ["password: ***", "on stderr"]
    log = (tmp_path / "logs/tool.log").read_text()
    assert "password: ***" in log
    assert "correct-horse" not in log


def test_failure_of_a_tool_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"not enough free nodes; the whole output is in .*tool.log") as caught:
        run_python("import sys; print('Error: not enough free nodes'); print('bye'); sys.exit(4)", tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InfraError, match="exit 4"):
        run_python("import sys; sys.exit(4)", tmp_path)


def test_tool_that_does_not_end_keeps_its_output_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="timeout after"):
        run_python("import time; print('begin', flush=True); time.sleep(60)", tmp_path, seconds=3)
    assert "begin" in (tmp_path / "logs/tool.log").read_text()


def test_missing_tool_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-tool: not found"):
        control_planes.run_command(["no-such-tool"], tmp_path / "log", 10)


SSH = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
  *"link set"*) ;;
  *@10.0.0.1*) echo '{first}'; echo '[{{"dev": "eth0"}}]' ;;
  *) echo '{second}'; echo '[{{"dev": "eth0"}}]' ;;
esac
"""


def links(**addresses: str) -> str:
    return json.dumps([{"ifname": name, "addr_info": [{"local": value}]} for name, value in addresses.items()])


@pytest.fixture
def inspect_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Inspect two nodes through an ssh that answers with these interfaces."""
    section = config.load("virtualwall").virtualwall
    assert section
    section = section.model_copy(update={"lans": {"1g": "192.168.1.0/24"}, "jump_host": "me@gate"})
    addresses = {"head": "192.168.1.10", "w1": "192.168.1.11"}
    value = {
        "name": "try",
        "settings": section.model_dump(),
        "nodes": {name: {"index": i, "addresses": {"1g": text}} for i, (name, text) in enumerate(addresses.items())},
        "fabrics": {"1g": {"rate_gbps": 1}},
        "state_dir": str(tmp_path),
    }
    logins = {"head": Login("10.0.0.1", 22, "me"), "w1": Login("10.0.0.2", 22, "me")}

    def inspect(first: dict[str, str], second: dict[str, str]) -> dict[str, Any]:
        (tmp_path / "ssh").write_text(SSH.format(folder=tmp_path, first=links(**first), second=links(**second)))
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        created, request = experiment.from_input(value)
        return created.inspect_nodes(request, logins)

    return inspect


def test_interfaces_are_found_by_address_and_host_keys_are_pinned(inspect_two_nodes: Any, tmp_path: Path) -> None:
    first, second = {"eth0": "10.0.0.1", "eno1": "192.168.1.10"}, {"eth0": "10.0.0.2", "eno1": "192.168.1.11"}
    assert inspect_two_nodes(first, second) == {
        "user": "me",
        "jump_host": "me@gate",
        "addresses": {"head": "10.0.0.1", "w1": "10.0.0.2"},
        "interfaces": {"1g": "eno1"},
    }
    for call in (tmp_path / "calls").read_text().splitlines():
        assert f"UserKnownHostsFile={tmp_path / 'known_hosts'}" in call
        assert "StrictHostKeyChecking=accept-new" in call
        assert "ProxyJump=me@gate" in call


def test_interfaces_with_different_names_are_renamed(inspect_two_nodes: Any, tmp_path: Path) -> None:
    found = inspect_two_nodes({"eno1": "192.168.1.10"}, {"eno7": "192.168.1.11"})
    assert found["interfaces"] == {"1g": "fabric0"}
    renamed = [call for call in (tmp_path / "calls").read_text().splitlines() if "link set" in call]
    assert len(renamed) == 2
    assert all("StrictHostKeyChecking=yes" in call for call in renamed)
    assert "ip link set eno7 name fabric0" in renamed[1]


def test_lan_on_the_control_interface_is_refused(inspect_two_nodes: Any) -> None:
    with pytest.raises(InfraError, match=r"192.168.1.10 is on eth0, the control network's interface"):
        inspect_two_nodes({"eth0": "192.168.1.10"}, {"eno1": "192.168.1.11"})


def test_lan_that_the_testbed_did_not_set_up_is_named(inspect_two_nodes: Any) -> None:
    with pytest.raises(InfraError, match=r"node w1: no interface has 192.168.1.11"):
        inspect_two_nodes({"eno1": "192.168.1.10"}, {"eno1": "192.168.1.99"})


@pytest.mark.parametrize("content", ["[]", '{"state": 1}', '{"expires": "tomorrow"}', '{"expires": "2026-01-01"}', "{"])
def test_damaged_record_of_an_experiment_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    state = State("virtualwall")
    monkeypatch.setattr(state, "dir", tmp_path)
    wall = VirtualWall(state, config.load("virtualwall"))
    (tmp_path / "experiment.json").write_text(content)
    with pytest.raises(UserError, match=r"^experiment\.json: [^\n]+$"):
        wall.status_notes()
    (tmp_path / "experiment.json").write_text('{"state": "ready", "expires": "2100-01-01T00:00:00+00:00"}')
    (tmp_path / "nodes.json").write_text(content)
    with pytest.raises(UserError, match=r"^nodes\.json: [^\n]+$"):
        wall.survivors(set())
