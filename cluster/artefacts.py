"""`make artefacts`: the packages, wheels, files and images of a cluster, for sites without internet access.

Python packages come from the lock files, files from versions.yml, Debian packages from the roles and from bin/setup.
Packages in the node image have their exact versions. Downloads are checked against the checksums listed here; apt
checks packages against Debian's signed index.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from typing import Any

from cluster import image, roles, wheelhouse
from cluster.core import config, files, locks, root
from cluster.core.config import ROOT, Cluster
from cluster.core.state import CACHE, State

# Lock file -> the machines that install its packages.
LOCKS = {
    "controller.lock": "this machine",
    "nodes.lock": "nodes",
    "nodes-cuda.lock": "nodes with GPUs",
    "nodes-cuda12.lock": "nodes with GPUs before Turing",
    "nccl.lock": "nodes with GPUs",
    "nccl-cuda12.lock": "nodes with GPUs before Turing",
    "jupyter.lock": "nodes with JupyterLab",
    "gpulab.lock": "this machine, for ENV=gpulab",
}
Row = dict[str, Any]


def wheels(cluster: Cluster) -> list[Row]:
    """What the Python of each machine installs: a lock also names packages for other Pythons and systems."""
    rows = []
    for name, where in LOCKS.items():
        here = where.startswith("this machine")
        python = platform.python_version() if here else config.PYTHONS[cluster.os_release]
        path = ROOT / "requirements" / name
        path = path if here else wheelhouse.for_python(path, python)
        if not path.exists():
            continue
        for one in locks.installed_by(python, path):
            rows.append(row("wheel", one.requirement.name, one.version, list(one.hashes), where))
    return rows


def row(kind: str, name: str, version: str, checksums: list[str], where: str) -> Row:
    return {"kind": kind, "name": name, "version": version, "checksums": checksums, "for": where}


def downloads() -> list[Row]:
    """Entries of versions.yml with a checksum are downloaded as files."""
    pinned = config.versions()
    return [
        row("file", name, str(pinned[name]), [f"sha256:{pinned[f'{name}_sha256']}"], "nodes")
        for name in pinned
        if f"{name}_sha256" in pinned
    ]


def debian(state: State, cluster: Cluster) -> list[Row]:
    node_image = image.name(cluster)
    rows = []
    if root.available() and image.exists(state, node_image):
        query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\n"]
        argv = [*image.sudo(), "podman", "run", "--rm", "--network=none", node_image, *query]
        done = subprocess.run(argv, env=state.environment(), capture_output=True, text=True, check=True)
        installed = (line.split() for line in done.stdout.splitlines())
        rows = [row("package", words[0], words[1], [], "nodes") for words in installed if len(words) == 2]
    listed = {one["name"] for one in rows}
    wanted = set(image.BASE_PACKAGES).union(*(roles.packages(role) for role in roles.active(cluster)))
    rows += [row("package", name, f"from {cluster.os_release}", [], "nodes") for name in sorted(wanted - listed)]
    return rows + [row("package", name, "", [], "this machine") for name in setup_packages()]


def setup_packages() -> list[str]:
    found = re.search(r"PACKAGES = \{(.*?)^\}", files.text(ROOT / "bin/setup"), re.DOTALL | re.MULTILINE)
    return sorted(set(re.findall(r': "([^"]+)"', found[1]))) if found else []


def images() -> list[Row]:
    """Third-party images in versions.yml. An image without a digest can change under its tag."""
    rows = []
    for value in map(str, config.versions().values()):
        if match := re.fullmatch(r"([a-z0-9.-]+\.[a-z]+/[^:@]+):([^@]+)(?:@(sha256:[0-9a-f]{64}))?", value):
            rows.append(row("image", match[1], match[2], [match[3]] if match[3] else [], "nodes with GPUs"))
    return rows


def nvidia() -> list[Row]:
    """Packages of NVIDIA's repositories; apt checks them with the key in versions.yml."""
    pinned = config.versions()
    names = [name for name in pinned if name.startswith("nvidia_") and not name.endswith("_key")]
    return [row("package", name, str(pinned[name]), [], "nodes with GPUs") for name in names]


def run(env: str, as_json: bool) -> int:
    cluster = config.load(env)
    state = State(env)
    rows = debian(state, cluster) + nvidia() + wheels(cluster) + downloads() + images()
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    # Plain lines with whole checksums, because the output is for other programs and for copying.
    for one in rows:
        sums = one["checksums"]
        more = f" and {len(sums) - 1} more, see --json" if len(sums) > 1 else ""
        print(f"{one['kind']:8}{one['name']} {one['version']} [{one['for']}] {(sums or [''])[0]}{more}".rstrip())
    print(f"{len(rows)} artefacts. After a first deploy, wheels and the compiled Horovod are in {CACHE}.")
    return 0
