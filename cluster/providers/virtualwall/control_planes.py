"""The two control planes of the Virtual Wall: jFed's experimenter CLI 2 and the SLICES CLI."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import yaml

from cluster.core import files, sections
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent
from cluster.providers import certificate, testbed
from cluster.providers.virtualwall import rspec
from cluster.providers.virtualwall.rspec import Login, Request, Reservation

COMMAND_SECONDS = 600
POLL_SECONDS = 5


def run_command(argv: list[str], log: Path, seconds: float, secret: str | None = None, cwd: Path | None = None) -> str:
    """Run a command and append its output to the log, without the secret. InfraError has the output's error line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    name = Path(argv[0]).name
    code: int | None = None
    try:
        done = subprocess.run(
            argv, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, timeout=seconds, preexec_fn=die_with_parent, cwd=cwd
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


class ControlPlane:
    def __init__(self, section: sections.VirtualWall, name: str, folder: Path) -> None:
        self.section, self.name, self.log = section, name, folder / f"logs/{section.backend}.log"


class Jfed(ControlPlane):
    """java -jar experimenter-cli2.jar --action FILE. FILE contains the password, so it is removed after the call."""

    request_file = "request.rspec"

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
        project = {"project": self.section.project, "projectSource": "PROVIDED", "failIfNoProject": True}
        return {"sliceName": self.name, **project}

    def run_action(self, action: dict[str, Any], seconds: float, folder: Path) -> str:
        secret = certificate.password(self.section.password_file, "cluster.virtualwall.password_file")
        password = {"passwordMethod": "DIRECT", "password": secret} if secret else {}
        user = {"pem": [str(Path(self.section.pem or "").expanduser())], **password}
        file = folder / "action.yml"
        file.touch(mode=0o600)
        outputs = [{"format": "TEXT", "target": "STDOUT"}]
        file.write_text(yaml.safe_dump({**action, "user": user, "actionOutputs": outputs}))
        argv = ["java", "-jar", str(Path(self.section.jar or "").expanduser()), "--action", str(file)]
        return run_command(argv, self.log, seconds, secret, cwd=folder)

    def create(self, request: Request) -> Reservation:
        minutes = self.section.ready_minutes
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            request_file, manifest = folder / "request.rspec", folder / "manifest.rspec"
            request_file.write_text(self.render(request))
            action = {
                "action": "RUN",
                "experiment": {
                    "requestRSpec": {"source": "PROVIDE_FILE", "providedContentSource": str(request_file)},
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
                return rspec.read_manifest(files.text(manifest), names)
            for inventory in sorted((folder / "ansible").rglob("*hosts*")):
                return Reservation(inventory_logins(files.text(inventory), names))
        raise InfraError(f"jFed succeeded but wrote neither a manifest nor an inventory; see {self.log}")

    def renew(self, hours: int) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            action = {"action": "RENEW", "slice": {**self.slice_fields(), "expireTimeMin": hours * 60}}
            self.run_action(action, COMMAND_SECONDS, Path(tmp))

    def delete(self) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            action = {"action": "DELETE", "slice": {**self.slice_fields(), "failOnNonExistingSlice": False}}
            self.run_action(action, COMMAND_SECONDS, Path(tmp))


class Slices(ControlPlane):
    """The SLICES CLI, with the credentials of `slices auth login`."""

    request_file = "request.json"

    def _call(self, *words: str, seconds: float = COMMAND_SECONDS) -> str:
        return run_command(["slices", *words], self.log, seconds)

    def check(self) -> None:
        self._call("project", "use", self.section.project)

    def render(self, request: Request) -> str:
        """The request in the CLI's format. It has no field for a LAN's rate: the nodes (shaped) or the site set it."""
        rspec.check_consistency(rspec.render(request))
        networks = [f"lan-{lan.name}" for lan in request.lans]
        spec = {
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
            "links": [{"friendly_name": name, "network_id": name, "type": "lan"} for name in networks],
        }
        return json.dumps(spec, indent=1) + "\n"

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
