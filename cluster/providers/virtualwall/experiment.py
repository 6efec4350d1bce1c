"""One experiment, from the request to nodes that answer over SSH. Terraform runs this module.

A record of the experiment is written before it is requested, so that destroy finds it even after a kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime
from typing_extensions import TypedDict

from cluster.core import files, sections, ssh
from cluster.core.errors import InfraError, UserError
from cluster.core.state import write_file
from cluster.providers import testbed
from cluster.providers.virtualwall import rspec
from cluster.providers.virtualwall.control_planes import CONTROL_PLANES
from cluster.providers.virtualwall.rspec import Login, Request

SSH_SECONDS = 300


class Address(TypedDict):
    local: str


class Interface(TypedDict):
    ifname: str
    addr_info: list[Address]


class Record(TypedDict, total=False):
    """experiment.json; empty if there is no experiment."""

    name: str
    backend: str
    state: str
    expires: AwareDatetime


class Nodes(TypedDict):
    """nodes.json: what was found on the nodes."""

    user: str
    jump_host: str | None
    addresses: dict[str, str]
    interfaces: dict[str, str]


class Experiment:
    def __init__(self, name: str, section: sections.VirtualWall, folder: Path) -> None:
        self.name, self.section, self.folder = name, section, folder
        self.record_file = folder / "experiment.json"
        self.nodes_file = folder / "nodes.json"
        self.known_hosts = folder / "known_hosts"
        self.control_plane = CONTROL_PLANES[section.backend](section, name, folder)

    def write(self, path: Path, value: Mapping[str, Any]) -> None:
        write_file(path, json.dumps(value, indent=1))

    def read_record(self) -> Record:
        """The record of the experiment; empty if there is none."""
        return files.record(self.record_file, Record) if self.record_file.exists() else {}

    def create(self, request: Request) -> None:
        text = self.control_plane.render(request)
        self.control_plane.check()
        if self.read_record():
            # A create that was killed left this. A half-made experiment cannot be continued.
            self.delete()
        (self.folder / self.control_plane.request_file).write_text(text)
        record = {"name": self.name, "backend": self.section.backend}
        self.write(self.record_file, {**record, "state": "requested"})
        try:
            reservation = self.control_plane.create(request)
            end = reservation.expires or self.expiry_from_now()
            self.write(self.nodes_file, self.inspect_nodes(request, reservation.logins))
        except (InfraError, UserError) as error:
            try:
                self.delete()
            except InfraError as second:
                raise InfraError(f"{error}; then: {second}") from None
            raise
        self.write(self.record_file, {**record, "state": "ready", "expires": end})

    def expiry_from_now(self) -> str:
        return (datetime.now(UTC) + timedelta(hours=self.section.hours)).isoformat(timespec="seconds")

    def inspect_nodes(self, request: Request, logins: dict[str, Login]) -> Nodes:
        """Log in to every node, pin its host key, and find the interface of each LAN by its address."""
        for name, login in logins.items():
            if login.port != 22:
                raise InfraError(f"node {name}: SSH is on port {login.port}; only 22 is supported")
        users, jumps = ({getattr(login, key) for login in logins.values()} for key in ("user", "jump_host"))
        if len(users) > 1 or len(jumps) > 1:
            raise InfraError("the logins of the nodes differ in user or jump host; this is not supported")
        with ThreadPoolExecutor(len(logins)) as pool:
            found = pool.map(partial(self.find_interfaces, request), logins, logins.values())
            by_node = dict(zip(logins, found, strict=True))
        return {
            "user": users.pop(),
            "jump_host": jumps.pop() or self.section.jump_host,
            "addresses": {name: login.host for name, login in logins.items()},
            "interfaces": {lan.name: self.common_interface(lan.name, by_node, logins) for lan in request.lans},
        }

    def ssh(self, login: Login, command: str, accept_new: bool = False) -> subprocess.CompletedProcess[str]:
        jump_host = login.jump_host or self.section.jump_host
        argv = ["ssh", "-i", str(Path(self.section.ssh_key).expanduser())]
        argv += ssh.connection_options(self.known_hosts, jump_host, accept_new=accept_new)
        argv += ["-oBatchMode=yes", "-oConnectTimeout=5", "-oLogLevel=ERROR", "-oHashKnownHosts=no"]
        argv += ["-oUpdateHostKeys=no", f"{login.user}@{login.host}", command]
        return ssh.gather({login.host: argv})[login.host]

    def find_interfaces(self, request: Request, name: str, login: Login) -> dict[str, str]:
        """LAN -> interface with the address from the request; never the interface of the control network."""
        deadline = time.monotonic() + min(SSH_SECONDS, self.section.ready_minutes * 60)
        while (done := self.ssh(login, "ip -json address; ip -json route show default", accept_new=True)).returncode:
            if time.monotonic() > deadline:
                raise InfraError(f"node {name} ({login.host}) does not answer over SSH: {done.stderr.strip()[-200:]}")
            time.sleep(2)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        links = files.answer(lines[0] if lines else "", f"node {name}: ip address", list[Interface])
        routes = files.answer(lines[1], f"node {name}: ip route", list[dict[str, Any]]) if len(lines) > 1 else []
        control = {route.get("dev") for route in routes}
        interface = {entry["local"]: link["ifname"] for link in links for entry in link["addr_info"]}
        found = {}
        for lan in request.lans:
            address = request.nodes[name][lan.name]
            if address not in interface:
                raise InfraError(f"node {name}: no interface has {address}; the testbed did not set up LAN {lan.name}")
            if interface[address] in control:
                raise InfraError(f"node {name}: {address} is on {interface[address]}, the control network's interface")
            found[lan.name] = interface[address]
        return found

    def common_interface(self, lan: str, by_node: dict[str, dict[str, str]], logins: dict[str, Login]) -> str:
        """The name of the LAN's interface on all nodes. If the names differ, the interfaces are renamed."""
        names = {node: interfaces[lan] for node, interfaces in by_node.items()}
        if len(set(names.values())) == 1:
            return next(iter(names.values()))
        wanted = "fabric0" if len(self.section.lans) == 1 else f"fab-{lan}"
        for node, old in names.items():
            if old == wanted:
                continue
            # An IPv4 interface that goes down loses its routes but keeps its addresses.
            steps = (f"{old} down", f"{old} name {wanted}", f"{wanted} up")
            done = self.ssh(logins[node], " && ".join(f"sudo ip link set {step}" for step in steps))
            if done.returncode:
                raise InfraError(f"node {node}: cannot rename {old} to {wanted}: {done.stderr.strip()[-200:]}")
        return wanted

    def renew(self) -> str:
        record = self.read_record()
        if record.get("state") != "ready":
            raise UserError("there is no experiment to renew; run `make deploy ENV=virtualwall`")
        self.control_plane.check()
        self.control_plane.renew(self.section.hours)
        end = self.expiry_from_now()
        self.write(self.record_file, {**record, "expires": end})
        return end

    def delete(self) -> None:
        """Release the nodes if there may be any; the record is removed last."""
        if not self.read_record():
            return
        try:
            self.control_plane.delete()
        except InfraError as error:
            text = f"experiment {self.name} may still have nodes: {error}; run `make destroy` again"
            raise InfraError(text) from None
        # The next nodes may have the same addresses and other host keys.
        for path in (self.known_hosts, self.nodes_file, self.record_file):
            path.unlink(missing_ok=True)


def from_input(value: dict[str, Any]) -> tuple[Experiment, Request]:
    """Read Terraform's input; terraform/modules/nodes assigns the numbers and addresses."""
    section = sections.VirtualWall.model_validate(value["settings"])
    nodes = sorted(value["nodes"].items(), key=lambda item: item[1]["index"])
    fabrics = sorted(value["fabrics"].items())
    request = Request(
        nodes={name: node["addresses"] for name, node in nodes},
        lans=tuple(rspec.Lan(name, section.lans[name], fabric["rate_gbps"]) for name, fabric in fabrics),
        component_manager=section.component_manager or "",
        hardware_type=section.hardware_type,
        disk_image=section.disk_image,
    )
    return Experiment(value["name"], section, Path(value["state_dir"])), request


def main() -> int:
    experiment, request = from_input(json.loads(os.environ["INPUT"]))
    create = partial(experiment.create, request)
    return testbed.run_tool(create if sys.argv[1] == "create" else experiment.delete, experiment.folder)


if __name__ == "__main__":
    sys.exit(main())
