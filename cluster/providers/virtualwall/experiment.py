"""One experiment from request to nodes that answer. Terraform runs this module.

That there may be an experiment is written down before it is asked for, so destroy finds it whatever happened between.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cluster.core import errors
from cluster.core.errors import InfraError, UserError
from cluster.core.sections import VirtualWall
from cluster.providers.virtualwall import rspec
from cluster.providers.virtualwall.rspec import Login, Request
from cluster.providers.virtualwall.tools import TOOLS, Tool

FABRIC = "fabric0"
SSH_SECONDS = 300


class Experiment:
    def __init__(self, name: str, settings: VirtualWall, folder: Path) -> None:
        self.name, self.settings, self.folder = name, settings, folder
        self.record = folder / "experiment.json"
        self.nodes_file = folder / "nodes.json"
        self.known_hosts = folder / "known_hosts"
        self.tool: Tool = TOOLS[settings.backend](settings, name, folder)

    def write(self, path: Path, value: dict[str, Any]) -> None:
        part = path.with_suffix(".part")
        with part.open("w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def read(self) -> dict[str, Any] | None:
        if not self.record.exists():
            return None
        found: dict[str, Any] = json.loads(self.record.read_text())
        return found

    def create(self, request: Request) -> None:
        text = self.tool.text(request)
        self.tool.check()
        if self.read():
            # What a create left that was killed: bare metal cannot be taken up half-way.
            self.delete()
        (self.folder / self.tool.file).write_text(text)
        self.write(self.record, {"name": self.name, "backend": self.settings.backend, "state": "asked for"})
        try:
            logins, expires = self.tool.create(request)
            end = expires or (datetime.now(UTC) + timedelta(hours=self.settings.hours)).isoformat(timespec="seconds")
            self.write(self.nodes_file, self.found(request, logins))
        except (InfraError, UserError) as error:
            try:
                self.delete()
            except InfraError as second:
                raise InfraError(f"{error}. And then: {second}") from None
            raise
        self.write(self.record, {"name": self.name, "backend": self.settings.backend, "state": "ready", "expires": end})

    def found(self, request: Request, logins: dict[str, Login]) -> dict[str, Any]:
        """Log in to every node, pin its host key, and find the interfaces of its LANs by their addresses."""
        for name, login in logins.items():
            if login.port != 22:
                raise InfraError(f"node {name}: SSH is on port {login.port}; only 22 is supported")
        users, jumps = ({getattr(login, key) for login in logins.values()} for key in ("user", "jump_host"))
        if len(users) > 1 or len(jumps) > 1:
            raise InfraError("the nodes' logins differ in user or jump host; one for all is supported")
        with ThreadPoolExecutor(len(logins)) as pool:
            names = list(logins)
            found = dict(
                zip(names, pool.map(lambda name: self.interfaces(request, name, logins[name]), names), strict=True)
            )
        interfaces = {lan.name: self.one_name(lan.name, found, logins) for lan in request.lans}
        return {
            "user": users.pop(),
            "jump_host": jumps.pop() or self.settings.jump_host,
            "addresses": {name: login.host for name, login in logins.items()},
            "interfaces": interfaces,
        }

    def ssh(self, login: Login, command: str, first: bool = False) -> subprocess.CompletedProcess[str]:
        options = [
            f"UserKnownHostsFile={self.known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            f"StrictHostKeyChecking={'accept-new' if first else 'yes'}",
            *(
                "IdentitiesOnly=yes",
                "BatchMode=yes",
                "ConnectTimeout=5",
                "LogLevel=ERROR",
                "HashKnownHosts=no",
                "UpdateHostKeys=no",
            ),
        ]
        jump = login.jump_host or self.settings.jump_host
        if jump:
            options.append(f"ProxyJump={jump}")
        argv = ["ssh", "-i", str(Path(self.settings.ssh_key).expanduser())]
        argv += [word for option in options for word in ("-o", option)]
        argv += [f"{login.user}@{login.host}", command]
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)

    def interfaces(self, request: Request, name: str, login: Login) -> dict[str, str]:
        """LAN -> interface, by the address the request gave it; never the one the control network is on."""
        deadline = time.monotonic() + min(SSH_SECONDS, self.settings.ready_minutes * 60)
        while (done := self.ssh(login, "ip -json address; ip -json route show default", first=True)).returncode:
            if time.monotonic() > deadline:
                raise InfraError(f"node {name} ({login.host}) does not answer over SSH: {done.stderr.strip()[-200:]}")
            time.sleep(2)
        texts = [line for line in done.stdout.splitlines() if line.strip()]
        links = json.loads(texts[0])
        control = {route.get("dev") for route in json.loads(texts[1])} if len(texts) > 1 else set()
        owner = {entry["local"]: link["ifname"] for link in links for entry in link["addr_info"]}
        found = {}
        for lan in request.lans:
            address = request.nodes[name][lan.name]
            if address not in owner:
                raise InfraError(f"node {name}: no interface has {address}; the testbed did not set up LAN {lan.name}")
            if owner[address] in control:
                raise InfraError(f"node {name}: {address} is on {owner[address]}, which is the control network's")
            found[lan.name] = owner[address]
        return found

    def one_name(self, lan: str, found: dict[str, dict[str, str]], logins: dict[str, Login]) -> str:
        """The name of the LAN's interface; where nodes differ in it, all are given the same one."""
        names = {node: interfaces[lan] for node, interfaces in found.items()}
        if len(set(names.values())) == 1:
            return next(iter(names.values()))
        wanted = FABRIC if len(self.settings.lans) == 1 else f"fab-{lan}"
        for node, old in names.items():
            if old == wanted:
                continue
            # Taking a link down drops its addresses' routes, not the addresses themselves (IPv4).
            command = (
                f"sudo ip link set {old} down && sudo ip link set {old} name {wanted} && sudo ip link set {wanted} up"
            )
            done = self.ssh(logins[node], command)
            if done.returncode:
                raise InfraError(f"node {node}: cannot call {old} {wanted}: {done.stderr.strip()[-200:]}")
        return wanted

    def renew(self) -> str:
        record = self.read()
        if not record or record["state"] != "ready":
            raise UserError("no experiment to renew; run `make deploy ENV=virtualwall`")
        self.tool.check()
        self.tool.renew(self.settings.hours)
        end = (datetime.now(UTC) + timedelta(hours=self.settings.hours)).isoformat(timespec="seconds")
        self.write(self.record, {**record, "expires": end})
        return end

    def delete(self) -> None:
        """Give the nodes back, if we may have any; the record goes last."""
        if self.read() is None:
            return
        try:
            self.tool.delete()
        except InfraError as error:
            raise InfraError(
                f"experiment {self.name} may still hold nodes: {error}; run `make destroy` again"
            ) from None
        # The next nodes may have these addresses with other host keys.
        for path in (self.known_hosts, self.nodes_file, self.record):
            path.unlink(missing_ok=True)


def from_input(value: dict[str, Any]) -> tuple[Experiment, Request]:
    """What Terraform hands over: numbering and addresses are its own (terraform/modules/nodes)."""
    settings = VirtualWall.model_validate(value["settings"])
    nodes = sorted(value["nodes"].items(), key=lambda item: item[1]["index"])
    request = Request(
        nodes={name: node["addresses"] for name, node in nodes},
        lans=tuple(
            rspec.Lan(name, settings.lans[name], fabric["rate_gbps"])
            for name, fabric in sorted(value["fabrics"].items())
        ),
        component_manager=settings.component_manager or "",
        hardware_type=settings.hardware_type,
        disk_image=settings.disk_image,
    )
    return Experiment(value["name"], settings, Path(value["state_dir"])), request


def main() -> int:
    experiment, request = from_input(json.loads(os.environ["INPUT"]))
    try:
        if sys.argv[1] == "create":
            experiment.create(request)
        else:
            experiment.delete()
    except (InfraError, UserError) as error:
        errors.pass_on(experiment.folder, error)
        print(f"fatal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
