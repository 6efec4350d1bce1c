"""A stand-in for the two commands of the Virtual Wall: `java -jar ... --action FILE` (jFed) and `slices`.

It checks requests as the testbed would. Nodes are containers on this machine, booted from the node image.
$STANDIN_DIR/script.json says which steps fail. install() writes the commands.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NODE_TOOL = "cluster.providers.local.node"
CONTROL = ipaddress.ip_network("10.86.0.0/24")
GENI = "{http://www.geni.net/resources/rspec/3}"


def install(folder: Path, image: str, public_key: Path) -> dict[str, str]:
    """Write the two commands into folder/bin; return the environment variables that callers need."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    (folder / "id_ed25519.pub").write_text(public_key.read_text())
    for name in ("java", "slices"):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        command.chmod(0o755)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "STANDIN_DIR": str(folder),
        "STANDIN_IMAGE": image,
        "SLICES_POLL_SECONDS": "0.2",
    }


class Wall:
    def __init__(self) -> None:
        self.folder = Path(os.environ["STANDIN_DIR"])
        script = self.folder / "script.json"
        self.script: dict[str, Any] = json.loads(script.read_text()) if script.exists() else {}

    def record_call(self, text: str) -> None:
        with (self.folder / "calls").open("a") as file:
            file.write(text + "\n")

    def node_tool(self, action: str, **spec: Any) -> None:
        env = {**os.environ, "INPUT": json.dumps({"state_dir": str(self.folder), **spec})}
        argv = [sys.executable, "-m", NODE_TOOL, action]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"Error: {done.stderr.strip()}")

    def boot(self, name: str, nodes: dict[str, str], subnet: str) -> dict[str, str]:
        """Create nodes with an address in the LAN; return their control addresses."""
        self.node_tool("remove-leftovers", cluster=name)
        for kind, cidr in (("management", str(CONTROL)), ("fabric", subnet)):
            values = {"name": f"{name}-{kind}", "subnet": cidr, "internal": kind == "fabric"}
            self.node_tool("create-network", cluster=name, **values)
        control = {node: str(CONTROL[10 + i]) for i, node in enumerate(nodes)}

        def create(node: str) -> None:
            self.node_tool(
                "create-node",
                cluster=name,
                name=node,
                addresses={"management": control[node], "fabric": nodes[node]},
                ssh_port=22,
                image=os.environ["STANDIN_IMAGE"],
                fuse=True,
            )

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(create, nodes))
        # Unlike bare metal, these nodes share cores: a waiting MPI rank must let others run.
        for node in nodes:
            setting = "mkdir -p ~horovod/.openmpi && echo mpi_yield_when_idle=1 > ~horovod/.openmpi/mca-params.conf"
            subprocess.run(["podman", "exec", f"{name}-{node}", "bash", "-c", setting], check=True)
        # Interfaces of equal machines do not always have the same name.
        if node := self.script.get("other_name"):
            ip_link = ("podman", "exec", f"{name}-{node}", "ip", "link", "set")
            for words in (("fabric0", "down"), ("fabric0", "name", "eno7"), ("eno7", "up")):
                subprocess.run([*ip_link, *words], check=True)
        return control

    def delete(self, name: str) -> None:
        self.record_call(f"deleted {name}")
        self.node_tool("remove-leftovers", cluster=name)

    def fail_if_scripted(self, step: str) -> None:
        if message := self.script.get(step):
            if message == "wait":
                (self.folder / "waiting").touch()
                time.sleep(600)
            raise SystemExit(f"Error: {message}")


def expect(condition: object, message: str) -> None:
    if not condition:
        raise SystemExit(f"Error: {message}")


def java(wall: Wall, argv: list[str]) -> None:
    import yaml

    from cluster.providers.virtualwall import rspec

    expect(argv[0] == "-jar" and Path(argv[1]).is_file(), "Unable to access jarfile")
    expect(argv[2] == "--action", "usage: --action FILE")
    file = Path(argv[3])
    expect(file.stat().st_mode & 0o077 == 0, "the action file contains a password and can be read by others")
    action = yaml.safe_load(file.read_text())
    user = action["user"]
    secret = ["-passin", f"pass:{user['password']}"] if "password" in user else ["-passin", "pass:"]
    unlocked = subprocess.run(
        ["openssl", "pkey", "-noout", "-in", user["pem"][0], *secret], capture_output=True, check=False
    )
    expect(unlocked.returncode == 0, "wrong password for login PEM")
    # The real tool prints this in its debug output.
    print(f"user: {user}")
    holder = action["experiment"]["slice"] if action["action"] == "RUN" else action["slice"]
    expect(holder["project"] == "horovod", f"user is not a member of project {holder['project']}")
    name = holder["sliceName"]
    wall.record_call(f"{action['action']} {name}")
    if action["action"] == "DELETE":
        wall.fail_if_scripted("delete")
        wall.delete(name)
        return
    if action["action"] == "RENEW":
        expect(holder["expireTimeMin"] > 0, "expireTimeMin")
        return
    expect(action["action"] == "RUN", f"unknown action {action['action']}")
    wall.fail_if_scripted("create")
    text = Path(action["experiment"]["requestRSpec"]["providedContentSource"]).read_text()
    rspec.check(text)
    root = ET.fromstring(text)  # noqa: S314
    addresses = {
        node.get("client_id"): [ip.attrib for ip in node.iter(f"{GENI}ip")] for node in root.iter(f"{GENI}node")
    }
    expect(all(len(found) == 1 for found in addresses.values()), "the stand-in has one LAN")
    first = next(iter(addresses.values()))[0]
    subnet = ipaddress.ip_interface(f"{first['address']}/{first['netmask']}").network
    control = wall.boot(name, {str(node): found[0]["address"] for node, found in addresses.items()}, str(subnet))
    wall.fail_if_scripted("ready")
    end = datetime.now(UTC) + timedelta(minutes=holder["expireTimeMin"])
    root.attrib.update({"type": "manifest", "expires": end.isoformat(timespec="seconds")})
    for node in root.iter(f"{GENI}node"):
        services = ET.SubElement(node, f"{GENI}services")
        login = {"authentication": "ssh-keys", "hostname": control[node.get("client_id", "")], "port": "22"}
        ET.SubElement(services, f"{GENI}login", {**login, "username": "ops"})
    Path(action["output"]["manifestRspecFile"]).write_text(ET.tostring(root, encoding="unicode"))
    print("Ready, because ExperimentState is READY")


def slices(wall: Wall, argv: list[str]) -> None:
    words, options = [], {}
    rest = iter(argv)
    for word in rest:
        if word == "--force":
            options[word] = "yes"
        elif word.startswith("--"):
            options[word] = next(rest)
        else:
            words.append(word)
    wall.record_call(" ".join(words[:2]))
    command = tuple(words[:2])
    if command == ("project", "use"):
        wall.fail_if_scripted("credentials")
        expect(words[2] == "horovod", f"project {words[2]} not found")
    elif command == ("experiment", "create"):
        expect(options["--duration"].endswith("h"), "duration")
        (wall.folder / f"experiment-{words[2]}").touch()
    elif command == ("bi", "create-from-file"):
        wall.fail_if_scripted("create")
        name = options["--experiment"]
        expect((wall.folder / f"experiment-{name}").exists(), f"experiment {name} not found")
        spec = json.loads(Path(words[2]).read_text())
        networks = {link["network_id"] for link in spec["links"] if link["type"] == "lan"}
        nodes = {}
        for resource in spec["resources"]:
            expect(resource["site_id"] and resource["flavor"] and resource["disk_image"], "incomplete resource")
            (card,) = resource["network_interfaces"]
            expect(card["network_id"] in networks, f"network {card['network_id']} not found")
            nodes[resource["friendly_name"]] = ipaddress.ip_interface(card["addresses"][0])
        subnet = str(next(iter(nodes.values())).network)
        control = wall.boot(name, {node: str(address.ip) for node, address in nodes.items()}, subnet)
        (wall.folder / f"experiment-{name}").write_text(json.dumps(control))
    elif command == ("bi", "list"):
        expect(options["--format"] == "ansible", "format")
        text = (wall.folder / f"experiment-{options['--experiment']}").read_text()
        for node, address in json.loads(text or "{}").items():
            if node != wall.script.get("never_up"):
                print(
                    f"{node} ansible_host={address} ansible_user=ops ansible_ssh_common_args='-o ServerAliveInterval=5'"
                )
    elif command == ("experiment", "extend"):
        expect((wall.folder / f"experiment-{words[2]}").exists(), "experiment not found")
    elif command == ("experiment", "delete"):
        expect("--force" in options, "add --force")
        expect((wall.folder / f"experiment-{words[2]}").exists(), "experiment not found")
        wall.delete(words[2])
        (wall.folder / f"experiment-{words[2]}").unlink()
    else:
        raise SystemExit(f"Error: no such command: {words}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    {"java": java, "slices": slices}[sys.argv[1]](Wall(), sys.argv[2:])
