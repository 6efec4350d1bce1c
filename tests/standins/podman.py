"""A stand-in for podman, nft and ip. Containers, networks and images are entries of $STANDIN_DIR/podman.json.

It knows the words that this project uses, and behaves like podman 4.3 where that matters: `network rm -f` and `rmi -f`
also remove the containers that use the network or the image; without -f both refuse. install() writes the commands.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import sys
from pathlib import Path
from typing import Any


def install(folder: Path) -> dict[str, str]:
    """Write the commands into folder/bin; return the environment variables that callers need."""
    commands = folder / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    for name in ("podman", "nft", "ip"):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {name} "$@"\n')
        command.chmod(0o755)
    write(folder, {"containers": {}, "networks": {}, "images": {}, "routes": []})
    return {"PATH": f"{commands}:{os.environ['PATH']}", "STANDIN_DIR": str(folder)}


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "podman.json").read_text()))


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "podman.json").write_text(json.dumps(content, indent=1))


def add_container(folder: Path, name: str, labels: dict[str, str], seed: Path | None, **values: Any) -> None:
    content = read(folder)
    mounts = {str(seed): "/var/lib/horovod-cluster-seed"} if seed else {}
    row = {"labels": labels, "mounts": mounts, "networks": [], "image": "", "state": "running", **values}
    content["containers"][name] = row
    write(folder, content)


def add_network(folder: Path, name: str, subnet: str, labels: dict[str, str] | None = None) -> None:
    content = read(folder)
    content["networks"][name] = {"subnet": subnet, "labels": labels or {}}
    write(folder, content)


def fail(text: str) -> None:
    raise SystemExit(f"Error: {text}")


def options(argv: list[str], flags: set[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The options as pairs, and the other words; an option that is not a flag has a value."""
    pairs, rest = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif "=" in word:
            name, _, value = word.partition("=")
            pairs.append((name, value))
        else:
            pairs.append((word, "" if word in flags else next(words)))
    return pairs, rest


def labels_of(pairs: list[tuple[str, str]]) -> dict[str, str]:
    return dict(value.split("=", 1) for name, value in pairs if name == "--label")


def ps(content: dict[str, Any], argv: list[str]) -> None:
    pairs, _ = options(argv, {"-a", "-q", "-aq"})
    rows = []
    for name, one in content["containers"].items():
        wanted = [value.partition("=")[::2] for key, value in pairs if key == "--filter"]
        given = {f"{key}={value}" for key, value in one["labels"].items()}
        if all(name == text.strip("^$") if kind == "name" else text in given for kind, text in wanted):
            rows.append(
                {
                    **{"Id": f"id-{name}", "Names": [name], "Labels": one["labels"] or None, "State": one["state"]},
                    **{"Mounts": list(one["mounts"].values()), "StartedAt": 0, "Networks": one["networks"]},
                    **{"Image": one["image"], "ImageID": one["image"]},
                }
            )
    quiet = any(key in ("-q", "-aq") for key, _ in pairs)
    print("\n".join(row["Id"] for row in rows) if quiet else json.dumps(rows))


def inspect(content: dict[str, Any], argv: list[str]) -> None:
    _, names = options(argv, set())
    rows = []
    for word in names:
        if one := content["containers"].get(word.removeprefix("id-")):
            mounts = [{"Source": source, "Destination": target} for source, target in one["mounts"].items()]
            rows.append({"Id": word, "Name": word.removeprefix("id-"), "Mounts": mounts})
    print(json.dumps(rows))


def network(content: dict[str, Any], argv: list[str]) -> None:
    action, *rest = argv
    pairs, names = options(rest, {"--disable-dns", "--internal", "-f", "-q"})
    networks = content["networks"]
    if action == "ls":
        wanted = [value.removeprefix("label=") for key, value in pairs if key == "--filter"]
        found = {
            name: one
            for name, one in networks.items()
            if all(text in {f"{key}={value}" for key, value in one["labels"].items()} for text in wanted)
        }
        rows = [
            {"name": name, "subnets": [{"subnet": one["subnet"]}], "labels": one["labels"]}
            for name, one in found.items()
        ]
        print("\n".join(found) if ("-q", "") in pairs else json.dumps(rows))
    elif action == "create":
        subnet = dict(pairs)["--subnet"]
        if names[0] in networks:
            fail(f"network name {names[0]} already used")
        if any(ipaddress.ip_network(subnet).overlaps(ipaddress.ip_network(one["subnet"])) for one in networks.values()):
            fail(f"subnet {subnet} is already used on the host or by another config")
        networks[names[0]] = {"subnet": subnet, "labels": labels_of(pairs)}
    else:
        for name in names:
            inside = [key for key, one in content["containers"].items() if name in one["networks"]]
            if name not in networks:
                fail(f"unable to find network with name or ID {name}: network not found")
            if inside and ("-f", "") not in pairs:
                fail(f'"{name}" has associated containers with it. Use -f to forcibly delete containers')
            for key in inside:
                del content["containers"][key]
            del networks[name]


def create(content: dict[str, Any], argv: list[str]) -> None:
    pairs, words = options(argv[: argv.index("/bin/sh")], {"--replace"})
    name = dict(pairs)["--name"]
    if name in content["containers"] and ("--replace", "") not in pairs:
        fail(f'the container name "{name}" is already in use')
    volumes = [value.split(":") for key, value in pairs if key == "--volume"]
    content["containers"][name] = {
        "labels": labels_of(pairs),
        "mounts": {source: target for source, target, _ in volumes},
        "networks": [value.split(":")[0] for key, value in pairs if key == "--network"],
        "image": words[-1],
        "state": "created",
    }


def remove(content: dict[str, Any], argv: list[str]) -> None:
    _, names = options(argv, {"-f", "-i"})
    for name in names:
        content["containers"].pop(name.removeprefix("id-"), None)


def images(content: dict[str, Any], argv: list[str]) -> None:
    if "json" in " ".join(argv):
        parents = content.get("parents", {})
        rows = [
            {"Id": one, "Names": [name], "Size": 10**9, "ParentId": parents.get(one, "")}
            for name, one in content["images"].items()
        ]
        print(json.dumps(rows))
    else:
        print("\n".join(content["images"]))


def rmi(content: dict[str, Any], argv: list[str]) -> None:
    pairs, names = options(argv, {"-f"})
    for name in names:
        users = [key for key, one in content["containers"].items() if one["image"] == content["images"][name]]
        if users and ("-f", "") not in pairs:
            fail(f"image used by {users[0]}: image is in use by a container")
        for key in users:
            del content["containers"][key]
        del content["images"][name]


def podman(folder: Path, argv: list[str]) -> None:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = read(folder)
        match argv:
            case ["start" | "stop", *rest]:
                content["containers"][rest[-1]]["state"] = "running" if argv[0] == "start" else "exited"
            case ["image", "exists", name]:
                raise SystemExit(0 if name in content["images"] else 1)
            case [action, *rest]:
                known = {"ps": ps, "inspect": inspect, "network": network, "create": create, "rm": remove}
                (known | {"images": images, "rmi": rmi})[action](content, rest)
        write(folder, content)


def main() -> None:
    folder = Path(os.environ["STANDIN_DIR"])
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:]) + "\n")
    if sys.argv[1] == "podman":
        podman(folder, sys.argv[2:])
    elif sys.argv[1] == "ip":
        print(json.dumps(read(folder)["routes"]))


if __name__ == "__main__":
    main()
