"""The two control planes of the Virtual Wall: jFed's experimenter CLI 2 and the SLICES CLI. Both run as commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import yaml

from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent
from cluster.core.sections import VirtualWall
from cluster.providers import certificate
from cluster.providers.virtualwall import rspec
from cluster.providers.virtualwall.rspec import Login, Request

RENEW_SECONDS = 600
POLL_SECONDS = 5


class Tool(Protocol):
    """What an experiment needs of a control plane."""

    file: str  # what the request is called in the state folder

    def check(self) -> None: ...
    def text(self, request: Request) -> str: ...
    def create(self, request: Request) -> tuple[dict[str, Login], str | None]: ...
    def renew(self, hours: int) -> None: ...
    def delete(self) -> None: ...


def call(argv: list[str], log: Path, seconds: float, secrets: tuple[str, ...] = (), cwd: Path | None = None) -> str:
    """Run a command with its output in the log, secrets blotted out; InfraError has the line that says why."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=seconds,
            preexec_fn=die_with_parent,
            cwd=cwd,
            check=False,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or "", -1
    except FileNotFoundError:
        raise UserError(f"{argv[0]}: not found; see docs/virtualwall.md for what to install") from None
    for secret in secrets:
        output = output.replace(secret, "***")
    with log.open("a") as file:
        file.write(f"\n$ {shlex.join(argv)}\n{output}")
    if code == -1:
        raise InfraError(f"{Path(argv[0]).name}: no end within {seconds / 60:.0f} minutes; see {log}")
    if code:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        telling = next((line for line in reversed(lines) if re.search("error|fail|wrong", line, re.I)), None)
        reason = telling or (lines[-1] if lines else f"exit {code}")
        raise InfraError(f"{Path(argv[0]).name}: {reason[:300]}; the whole output is in {log}")
    return output


def inventory_logins(text: str, nodes: list[str]) -> dict[str, Login]:
    """Logins from an Ansible inventory (INI) as both tools write it."""
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
    missing = [name for name in nodes if name not in found]
    if missing:
        raise InfraError(f"the inventory has no login for {', '.join(missing)}")
    return {name: found[name] for name in nodes}


class Jfed:
    """java -jar experimenter-cli2.jar --action FILE. The file holds the password, so it lives as long as the call."""

    file = "request.rspec"

    def __init__(self, settings: VirtualWall, name: str, folder: Path) -> None:
        self.settings, self.name, self.log = settings, name, folder / "logs/jfed.log"

    def check(self) -> None:
        certificate.check(self.settings.pem or "", "cluster.virtualwall.pem")
        jar = Path(self.settings.jar or "").expanduser()
        if not jar.is_file():
            raise UserError(f"cluster.virtualwall.jar: {jar} does not exist; see docs/virtualwall.md where to get it")

    def text(self, request: Request) -> str:
        text = rspec.render(request)
        rspec.check(text)
        return text

    def slice(self) -> dict[str, Any]:
        return {
            "sliceName": self.name,
            "project": self.settings.project,
            "projectSource": "PROVIDED",
            "failIfNoProject": True,
        }

    def act(self, action: dict[str, Any], seconds: float, folder: Path) -> str:
        secret = certificate.password(self.settings.password_file, "cluster.virtualwall.password_file")
        user: dict[str, Any] = {"pem": [str(Path(self.settings.pem or "").expanduser())]}
        if secret:
            user |= {"passwordMethod": "DIRECT", "password": secret}
        file = folder / "action.yml"
        file.touch(mode=0o600)
        file.write_text(
            yaml.safe_dump({**action, "user": user, "actionOutputs": [{"format": "TEXT", "target": "STDOUT"}]})
        )
        jar = str(Path(self.settings.jar or "").expanduser())
        argv = ["java", "-jar", jar, "--action", str(file)]
        return call(argv, self.log, seconds, (secret,) if secret else (), cwd=folder)

    def create(self, request: Request) -> tuple[dict[str, Login], str | None]:
        minutes = self.settings.ready_minutes
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            (folder / "request.rspec").write_text(self.text(request))
            manifest = folder / "manifest.rspec"
            action = {
                "action": "RUN",
                "experiment": {
                    "requestRSpec": {
                        "source": "PROVIDE_FILE",
                        "providedContentSource": str(folder / "request.rspec"),
                    },
                    "slice": {
                        **self.slice(),
                        "expireTimeMin": self.settings.hours * 60,
                        "failOnExistingSlice": False,
                        "renewExistingSliceIfNeeded": True,
                    },
                    "waitForReady": {"enabled": True, "maxTimeMin": minutes},
                },
                "deleteOn": {"failCreate": True, "failBecomeReady": True},
                "output": {"manifestRspecFile": str(manifest), "ansibleDir": str(folder / "ansible")},
            }
            self.act(action, (minutes + 5) * 60, folder)
            names = list(request.nodes)
            if manifest.exists():
                text = manifest.read_text()
                return rspec.logins(text, names), rspec.expires(text)
            for inventory in sorted((folder / "ansible").rglob("*hosts*")):
                return inventory_logins(inventory.read_text(), names), None
        raise InfraError(f"jFed ended well but left neither a manifest nor an inventory; see {self.log}")

    def renew(self, hours: int) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            action = {"action": "RENEW", "slice": {**self.slice(), "expireTimeMin": hours * 60}}
            self.act(action, RENEW_SECONDS, Path(tmp))

    def delete(self) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            action = {"action": "DELETE", "slice": {**self.slice(), "failOnNonExistingSlice": False}}
            self.act(action, RENEW_SECONDS, Path(tmp))


class Slices:
    """The SLICES CLI; who we are is what `slices auth login` left behind."""

    file = "request.json"

    def __init__(self, settings: VirtualWall, name: str, folder: Path) -> None:
        self.settings, self.name, self.log = settings, name, folder / "logs/slices.log"

    def _call(self, *words: str, seconds: float = RENEW_SECONDS) -> str:
        return call(["slices", *words], self.log, seconds)

    def check(self) -> None:
        self._call("project", "use", self.settings.project)

    def spec(self, request: Request) -> dict[str, Any]:
        """The request in the CLI's own words. It has none for a LAN's rate: nodes keep it (shaped) or the site does."""
        return {
            "resources": [
                {
                    "site_id": self.settings.site,
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

    def text(self, request: Request) -> str:
        rspec.check_sense(rspec.render(request))
        return json.dumps(self.spec(request), indent=1) + "\n"

    def create(self, request: Request) -> tuple[dict[str, Login], str | None]:
        duration = f"{self.settings.hours}h"
        self._call("experiment", "create", self.name, "--duration", duration)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(self.text(request))
            file.flush()
            self._call("bi", "create-from-file", file.name, "--experiment", self.name, "--duration", duration)
        deadline = time.monotonic() + self.settings.ready_minutes * 60
        while True:
            text = self._call("bi", "list", "--experiment", self.name, "--format", "ansible")
            try:
                return inventory_logins(text, list(request.nodes)), None
            except InfraError as error:
                if time.monotonic() > deadline:
                    raise InfraError(f"after {self.settings.ready_minutes} minutes {error}") from None
            time.sleep(float(os.environ.get("SLICES_POLL_SECONDS", POLL_SECONDS)))

    def renew(self, hours: int) -> None:
        self._call("experiment", "extend", self.name, "--duration", f"{hours}h")

    def delete(self) -> None:
        try:
            self._call("experiment", "delete", self.name, "--force")
        except InfraError as error:
            if "not found" not in str(error).lower():
                raise


TOOLS: dict[str, type[Jfed] | type[Slices]] = {"jfed": Jfed, "slices": Slices}
