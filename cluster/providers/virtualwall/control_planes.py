"""The two control planes of the Virtual Wall: jFed's experimenter CLI 2 and the SLICES CLI."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from cluster.core import sections
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent
from cluster.providers import certificate, testbed
from cluster.providers.virtualwall import rspec
from cluster.providers.virtualwall.rspec import Login, Request

COMMAND_SECONDS = 600
POLL_SECONDS = 5


@dataclass(frozen=True)
class Reservation:
    """expires is None if the control plane does not report it."""

    logins: dict[str, Login]
    expires: str | None = None


class ControlPlane(Protocol):
    section: sections.VirtualWall
    request_file: str  # name of the request in the state folder

    def check(self) -> None: ...
    def render(self, request: Request) -> str: ...
    def create(self, request: Request) -> Reservation: ...
    def renew(self, hours: int) -> None: ...
    def delete(self) -> None: ...


def run_command(argv: list[str], log: Path, seconds: float, secret: str | None = None, cwd: Path | None = None) -> str:
    """Run a command and append its output to the log, without the secret. InfraError has the output's error line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    name = Path(argv[0]).name
    code: int | None = None
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            preexec_fn=die_with_parent,
            cwd=cwd,
            check=False,
        )
        data, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        data = error.stdout or b""
    except FileNotFoundError:
        raise UserError(f"{argv[0]}: not found; see docs/virtualwall.md for what to install") from None
    output = data.decode(errors="replace")
    if secret:
        output = output.replace(secret, "***")
    with log.open("a") as file:
        file.write(f"\n$ {shlex.join(argv)}\n{output}")
    if code is None:
        raise InfraError(f"{name}: timeout after {seconds / 60:.0f} minutes; see {log}")
    if code:
        raise InfraError(f"{name}: {testbed.error_line(output) or f'exit {code}'}; the whole output is in {log}")
    return output


def inventory_logins(text: str, nodes: list[str]) -> dict[str, Login]:
    """Logins from an Ansible inventory (INI), as both tools write it."""
    found = {}
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        values = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        host = values.get("ansible_host") or values.get("ansible_ssh_host")
        user = values.get("ansible_user") or values.get("ansible_ssh_user")
        if words and host and user:
            jump = re.search(r"(?:-J |ProxyJump=)(\S+)", values.get("ansible_ssh_common_args", ""))
            port = int(values.get("ansible_port") or values.get("ansible_ssh_port") or 22)
            found[words[0]] = Login(host, port, user, jump[1].strip("'\"") if jump else None)
    return rspec.require_logins(found, nodes, "inventory")


class Jfed:
    """java -jar experimenter-cli2.jar --action FILE. FILE contains the password, so it is removed after the call."""

    request_file = "request.rspec"

    def __init__(self, section: sections.VirtualWall, name: str, folder: Path) -> None:
        self.section, self.name, self.log = section, name, folder / "logs/jfed.log"

    def check(self) -> None:
        certificate.check(self.section.pem or "", "cluster.virtualwall.pem")
        jar = Path(self.section.jar or "").expanduser()
        if not jar.is_file():
            raise UserError(f"cluster.virtualwall.jar: {jar} does not exist; docs/virtualwall.md says where to get it")

    def render(self, request: Request) -> str:
        text = rspec.render(request)
        rspec.check(text)
        return text

    def slice_fields(self) -> dict[str, Any]:
        return {
            "sliceName": self.name,
            "project": self.section.project,
            "projectSource": "PROVIDED",
            "failIfNoProject": True,
        }

    def run_action(self, action: dict[str, Any], seconds: float, folder: Path) -> str:
        secret = certificate.password(self.section.password_file, "cluster.virtualwall.password_file")
        user: dict[str, Any] = {"pem": [str(Path(self.section.pem or "").expanduser())]}
        if secret:
            user |= {"passwordMethod": "DIRECT", "password": secret}
        file = folder / "action.yml"
        file.touch(mode=0o600)
        file.write_text(
            yaml.safe_dump({**action, "user": user, "actionOutputs": [{"format": "TEXT", "target": "STDOUT"}]})
        )
        jar = str(Path(self.section.jar or "").expanduser())
        argv = ["java", "-jar", jar, "--action", str(file)]
        return run_command(argv, self.log, seconds, secret, cwd=folder)

    def create(self, request: Request) -> Reservation:
        minutes = self.section.ready_minutes
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            (folder / "request.rspec").write_text(self.render(request))
            manifest = folder / "manifest.rspec"
            action = {
                "action": "RUN",
                "experiment": {
                    "requestRSpec": {
                        "source": "PROVIDE_FILE",
                        "providedContentSource": str(folder / "request.rspec"),
                    },
                    "slice": {
                        **self.slice_fields(),
                        "expireTimeMin": self.section.hours * 60,
                        "failOnExistingSlice": False,
                        "renewExistingSliceIfNeeded": True,
                    },
                    "waitForReady": {"enabled": True, "maxTimeMin": minutes},
                },
                "deleteOn": {"failCreate": True, "failBecomeReady": True},
                "output": {"manifestRspecFile": str(manifest), "ansibleDir": str(folder / "ansible")},
            }
            self.run_action(action, (minutes + 5) * 60, folder)
            names = list(request.nodes)
            if manifest.exists():
                text = manifest.read_text()
                return Reservation(rspec.logins(text, names), rspec.expires(text))
            for inventory in sorted((folder / "ansible").rglob("*hosts*")):
                return Reservation(inventory_logins(inventory.read_text(), names))
        raise InfraError(f"jFed succeeded but wrote neither a manifest nor an inventory; see {self.log}")

    def renew(self, hours: int) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            action = {"action": "RENEW", "slice": {**self.slice_fields(), "expireTimeMin": hours * 60}}
            self.run_action(action, COMMAND_SECONDS, Path(tmp))

    def delete(self) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            action = {"action": "DELETE", "slice": {**self.slice_fields(), "failOnNonExistingSlice": False}}
            self.run_action(action, COMMAND_SECONDS, Path(tmp))


class Slices:
    """The SLICES CLI, with the credentials of `slices auth login`."""

    request_file = "request.json"

    def __init__(self, section: sections.VirtualWall, name: str, folder: Path) -> None:
        self.section, self.name, self.log = section, name, folder / "logs/slices.log"

    def _call(self, *words: str, seconds: float = COMMAND_SECONDS) -> str:
        return run_command(["slices", *words], self.log, seconds)

    def check(self) -> None:
        self._call("project", "use", self.section.project)

    def spec(self, request: Request) -> dict[str, Any]:
        """The request in the CLI's format. It has no field for a LAN's rate: the nodes (shaped) or the site set it."""
        return {
            "resources": [
                {
                    "site_id": self.section.site,
                    "friendly_name": name,
                    "disk_image": request.disk_image,
                    "flavor": request.hardware_type,
                    "network_interfaces": [
                        {
                            "port_id": f"if{i}",
                            "network_id": f"lan-{lan.name}",
                            "addresses": [f"{addresses[lan.name]}/{lan.subnet.partition('/')[2]}"],
                        }
                        for i, lan in enumerate(request.lans)
                    ],
                }
                for name, addresses in request.nodes.items()
            ],
            "links": [
                {"friendly_name": f"lan-{lan.name}", "network_id": f"lan-{lan.name}", "type": "lan"}
                for lan in request.lans
            ],
        }

    def render(self, request: Request) -> str:
        rspec.check_consistency(rspec.render(request))
        return json.dumps(self.spec(request), indent=1) + "\n"

    def create(self, request: Request) -> Reservation:
        duration = f"{self.section.hours}h"
        self._call("experiment", "create", self.name, "--duration", duration)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(self.render(request))
            file.flush()
            self._call("bi", "create-from-file", file.name, "--experiment", self.name, "--duration", duration)
        deadline = time.monotonic() + self.section.ready_minutes * 60
        while True:
            text = self._call("bi", "list", "--experiment", self.name, "--format", "ansible")
            try:
                return Reservation(inventory_logins(text, list(request.nodes)))
            except InfraError as error:
                if time.monotonic() > deadline:
                    raise InfraError(f"after {self.section.ready_minutes} minutes: {error}") from None
            time.sleep(float(os.environ.get("SLICES_POLL_SECONDS", POLL_SECONDS)))

    def renew(self, hours: int) -> None:
        self._call("experiment", "extend", self.name, "--duration", f"{hours}h")

    def delete(self) -> None:
        try:
            self._call("experiment", "delete", self.name, "--force")
        except InfraError as error:
            if "not found" not in str(error).lower():
                raise


CONTROL_PLANES: dict[str, type[Jfed] | type[Slices]] = {"jfed": Jfed, "slices": Slices}
