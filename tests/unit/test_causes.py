"""An error line holds the cause, not the tool's headline."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.comm import measure
from bench.sweep import attempt
from bench.worker.protocol import MARK
from cluster.core import causes
from cluster.core.errors import InfraError
from cluster.core.progress import Progress

ATTRIBUTE = """
Error: Unsupported attribute

  on main.tf line 3, in locals:
   3:   x = local.cluster.storage.backend
    ├────────────────
    │ local.cluster is object with 1 attribute "a"

This object does not have an attribute named "storage".

Error: another one

  with terraform_data.a,
"""
PROVISIONER = """
Warning: something

Error: local-exec provisioner error

  with terraform_data.network["fabric"],
  on network.tf line 17, in resource "terraform_data" "network":
  17:   provisioner "local-exec" {

Error running command 'python -m cluster.providers.local.node create-network': exit
status 1. Output: podman network failed: Error: subnet 10.77.1.0/24 is
already used on the host or by another config
"""
BOXED = """╷
│ Error: Invalid value for variable
│
│   on cluster.tf line 2:
│    2: variable "nodes" {
│     ├────────────────
│     │ var.nodes is 0
│
│ There is at least one node.
╵
"""
MESSAGE = (
    "Unable to start service nftables: Job for nftables.service failed because the control process exited with error "
    'code.\nSee "systemctl status nftables.service" and "journalctl -xeu nftables.service" for details.\n'
)
JOURNAL = """Starting nftables.service - nftables...
/etc/nftables.conf:12:9-13: Error: syntax error, unexpected string
nftables.service: Main process exited, code=exited, status=1/FAILURE
nftables.service: Failed with result 'exit-code'.
Failed to start nftables.service - nftables.
"""


def playbook(**result: object) -> str:
    lines = ["TASK [firewall : Start nftables] ****", "ok: [head]"]
    return "\n".join([*lines, f"fatal: [head -> w1]: FAILED! => {json.dumps(result)}", "PLAY RECAP ****"])


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            ATTRIBUTE,
            'Unsupported attribute: This object does not have an attribute named "storage". (main.tf line 3)',
        ),
        (
            PROVISIONER,
            "podman network failed: Error: subnet 10.77.1.0/24 is already used on the host or by another config",
        ),
        (BOXED, "Invalid value for variable: There is at least one node. (cluster.tf line 2)"),
        ("killed\n", "killed"),
        ("", "no output"),
    ],
)
def test_terraforms_explanation_is_in_the_line(output: str, line: str) -> None:
    assert causes.terraform(output) == line


def test_service_that_does_not_start_says_why() -> None:
    asked = []

    def journal(node: str, unit: str) -> str:
        asked.append((node, unit))
        return JOURNAL

    line = causes.ansible(playbook(msg=MESSAGE), journal)
    assert asked == [("w1", "nftables.service")]
    assert line.startswith("w1: firewall : Start nftables: Unable to start service nftables")
    assert line.endswith("/etc/nftables.conf:12:9-13: Error: syntax error, unexpected string")
    assert "systemctl status" not in line


@pytest.mark.parametrize(
    ("result", "end"),
    [
        ({"msg": "No package matching 'x' is available"}, "No package matching 'x' is available"),
        ({"msg": "non-zero return code", "stderr": "first\nno space left on device"}, "no space left on device"),
        ({"cmd": "true", "stderr": "killed"}, "killed"),
    ],
)
def test_message_of_a_task_is_in_the_line_with_its_node(result: dict[str, str], end: str) -> None:
    line = causes.ansible(playbook(**result), lambda *_: pytest.fail("no service failed"))
    assert line.startswith("w1: firewall : Start nftables: ")
    assert line.endswith(end)
    assert "\n" not in line


def test_playbook_that_does_not_start_says_why() -> None:
    output = "PLAY [all]\n[ERROR]: the role 'x' was not found\n"
    assert causes.ansible(output, lambda *_: "") == "[ERROR]: the role 'x' was not found"


EVENT = f'{MARK}{{"type": "trial", "id": "a", "rtt_error": 0}}'


def test_launch_that_ends_early_says_why_and_not_the_workers_last_event(tmp_path: Path) -> None:
    log = tmp_path / "launch.log"
    for said, line in {"RuntimeError: no route\n": "RuntimeError: no route", "": "no output"}.items():
        log.write_text(f"{EVENT}\n{said}{EVENT}\n")
        assert attempt.last_line(log) == line


def test_collectives_that_fail_say_why_and_not_the_workers_last_event() -> None:
    work = measure.Communication.__new__(measure.Communication)
    work.progress = Progress()
    script = f"echo '{EVENT}'; echo 'RuntimeError: no route' >&2; echo '{EVENT}' >&2; exit 1"
    work.executor = SimpleNamespace(argv=lambda _: ["sh", "-c", script], grace=1)
    launch = SimpleNamespace(engine="ddp", hosts=("head", "w1"))
    with pytest.raises(InfraError, match=r"^ddp on 2 nodes failed: RuntimeError: no route$"):
        work.output(launch, 10)
