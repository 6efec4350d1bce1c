"""The node image: built once per content, booted by every node.

base   Debian with systemd and SSH, from mmdebstrap       key: release, packages, this machine's CA certificates
node   base plus every role's install half (image.yml)    key: base, roles, versions.yml, the roles' locks
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cluster import background, gpus, horovod_wheel, nccl_tests, roles, survey, ubuntu_keyring, wheelhouse
from cluster.core import root, ssh
from cluster.core.config import RELEASES, ROOT, Cluster, layout, versions
from cluster.core.process import PlaybookTasks, run_logged
from cluster.core.progress import Progress
from cluster.core.state import CACHE, State

BASE_PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "python3-apt", "sudo", "iproute2"),
    *("iputils-ping", "nftables", "ca-certificates", "procps", "kmod", "less"),
)
CA_ANCHORS = Path("/usr/local/share/ca-certificates")
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# system -> archive, components
ARCHIVES = {"debian": ([], "main"), "ubuntu": (["http://archive.ubuntu.com/ubuntu"], "main,universe")}
# A module name: Terraform's state must not contain a path that may change.
NODE_TOOL = "cluster.providers.local.node"
# As in Debian's own slim images: no manuals and translations. Nothing of a container has to survive a power failure.
DPKG_OPTIONS = (
    "force-unsafe-io",
    *(f"path-exclude=/usr/share/{folder}/*" for folder in ("doc", "info", "locale", "man")),
    "path-include=/usr/share/doc/*/copyright",
    # 212 MB that only an old page of Prometheus reads.
    "path-exclude=/usr/share/javascript/moment-timezone/data/*",
)
BUILD_SUBNET = "10.76.255.0/24"
# Mount points on the builder: horovod_packages in roles/horovod, jupyterlab_packages in roles/jupyterlab.
ON_NODE = {
    **dict.fromkeys(("horovod", "horovod-cuda", "horovod-cuda12"), "/var/cache/wheelhouse"),
    "jupyterlab": "/var/cache/wheelhouse-jupyterlab",
}


def sudo() -> list[str]:
    return root.sudo("podman", "--preserve-env=CONTAINERS_CONF")


def digest_of(paths: Iterable[Path], *texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for path in sorted(paths):
        digest.update(str(path.name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def base_key(release: str) -> str:
    return digest_of(CA_ANCHORS.glob("*.crt"), release, *BASE_PACKAGES, *DPKG_OPTIONS)


def role_files(role: str) -> list[Path]:
    """Files of the install half. Those of the configure half do not change the image."""
    skipped = ("molecule", "configure.yml", "validate.yml", "remove.yml", "meta")
    folder = ROOT / "roles" / role
    files = [path for path in folder.glob("**/*") if path.is_file()]
    files = [path for path in files if not any(part in skipped for part in path.relative_to(folder).parts)]
    tasks = "".join(path.read_text() for path in files if "tasks" in path.relative_to(folder).parts)
    return [path for path in files if path.parent.name != "templates" or path.name in tasks]


def node_key(cluster: Cluster, wheelhouses: Iterable[str] | None = None, arch_flags: str = "") -> str:
    """Digest of everything that the install halves of the cluster's roles depend on."""
    active = roles.active(cluster)
    files = [path for role in active for path in role_files(role)]
    files += [ROOT / "ansible/image.yml", ROOT / "versions.yml", ROOT / "cluster/core/layout.yml"]
    files += [wheelhouse.lock(name, cluster.os_release) for name in wheelhouses or wheelhouses_of(cluster)]
    return digest_of(files, base_key(cluster.os_release), cluster.storage.backend, arch_flags, *active)


def wheelhouses_of(cluster: Cluster, stack: str = "") -> list[str]:
    """Wheelhouses of all nodes. A cluster may have nodes with GPUs and nodes without."""
    stack = stack or gpus.expected(survey.models(cluster))
    found = {one for count in cluster.gpus() for one in wheelhouses_in(cluster, "cuda" if count else "cpu", stack)}
    return sorted(found | ({of_stack("nccl", stack)} if cluster.features.gpu and any(cluster.gpus()) else set()))


def wheelhouses_in(cluster: Cluster, device: str, stack: str = "") -> list[str]:
    """Wheelhouses of one node or of the image."""
    stack = stack or gpus.expected(survey.models(cluster))
    torch = of_stack("horovod-cuda", stack) if device == "cuda" else "horovod"
    return [torch, *(["jupyterlab"] if cluster.features.jupyterlab else [])]


def of_stack(name: str, stack: str) -> str:
    """The wheelhouse of a CUDA stack: horovod-cuda or horovod-cuda12."""
    return f"{name.removesuffix('-cuda')}-cuda{stack}" if stack != gpus.NEWEST else name


def node_variables(state: State, cluster: Cluster) -> dict[str, object]:
    """Variables of the install halves, for the builder and for deployed nodes."""
    release, decided = cluster.os_release, survey.decision(state, cluster)
    names = {
        **{"cpu": "horovod", "cuda": of_stack("horovod-cuda", decided.stack)},
        **{"nccl": of_stack("nccl", decided.stack), "jupyterlab": "jupyterlab"},
    }
    return {
        "state_dir": str(state.dir),
        "versions": versions(),
        "layout": dict(layout()),
        "cluster_roles": roles.active(cluster),
        "node_key": node_key(cluster, wheelhouses_of(cluster, decided.stack), decided.arch_flags),
        "shared_storage_backend": cluster.storage.backend,
        "wheelhouses": {key: str(wheelhouse.folder(one, release)) for key, one in names.items()},
        "locks": {key: str(wheelhouse.lock(one, release)) for key, one in names.items()},
        "cuda_stack": decided.stack,
        "cpu_flags": decided.arch_flags,
        "nccl_tests_cache": str(nccl_tests.folder()),
        "horovod_wheel_cache": str(CACHE / "horovod"),
        "horovod_wheel_given": horovod_wheel.given(cluster),
    }


def packages(cluster: Cluster) -> set[str]:
    """Debian packages that the install halves of the cluster's roles need in any case."""
    patterns = ("install.yml", f"{cluster.storage.backend}/install.yml")
    return {one for role in roles.active(cluster) for pattern in patterns for one in roles.packages(role, pattern)}


def exists(state: State, image: str) -> bool:
    argv = [*sudo(), "podman", "image", "exists", image]
    return subprocess.run(argv, env=state.environment(), capture_output=True, check=False).returncode == 0


def name(cluster: Cluster, device: str = "cpu") -> str:
    return f"localhost/horovod-cluster-node:{cluster.os_release}-{node_key(cluster, wheelhouses_in(cluster, device))}"


def ensure(state: State, cluster: Cluster, progress: Progress, device: str = "cpu") -> str:
    """Name of the node image. The image and its base are built if they are missing."""
    image = name(cluster, device)
    if exists(state, image):
        return image
    with one_at_a_time(progress):
        if exists(state, image):
            return image
        with ThreadPoolExecutor() as pool:
            wanted = wheelhouses_in(cluster, device)
            wheels = pool.submit(wheelhouse.fill, wanted, cluster.os_release, state.log("image"), progress)
            base = ensure_base(state, cluster.os_release, progress)
        bake(state, cluster, base, image, {"horovod_device": device}, wheels.result(), progress)
    return image


def ensure_base(state: State, release: str, progress: Progress) -> str:
    base = f"localhost/horovod-cluster-base:{release}-{base_key(release)}"
    if not exists(state, base):
        title = RELEASES[release].title
        with progress.part("root", f"creating a {title} root file system", f"{title} root created"):
            make_base(state, release, base, progress)
    return base


@contextmanager
def one_at_a_time(progress: Progress) -> Iterator[None]:
    """Environments share the cache and the builder's subnet, so a second one waits and then finds the image."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "image.lock").open("w") as lock:
        with progress.part("image", "waiting for another image build on this machine"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_base(state: State, release: str, image: str, progress: Progress) -> None:
    hooks = [
        'chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 ops',
        'chroot "$1" install -d -m 700 -o ops -g ops /home/ops/.ssh',
        "printf 'ops ALL=(ALL) NOPASSWD: ALL\\n' > \"$1/etc/sudoers.d/ops\"",
        'chmod 440 "$1/etc/sudoers.d/ops"',
        'rm -f "$1"/etc/ssh/ssh_host_*',
    ]
    if any(CA_ANCHORS.glob("*.crt")):
        hooks = [f"copy-in {' '.join(map(str, CA_ANCHORS.glob('*.crt')))} {CA_ANCHORS}", *hooks]
        hooks.append('chroot "$1" update-ca-certificates')
    options = [f"--include={','.join(BASE_PACKAGES)}", *(f"--customize-hook={hook}" for hook in hooks)]
    system, title, _ = RELEASES[release]
    archive, components = ARCHIVES[system]
    # Given explicitly: Ubuntu's apt does not trust Debian's archive, and the reverse.
    keyring = ubuntu_keyring.find(progress) if system == "ubuntu" else DEBIAN_KEYRING
    options += [f"--keyring={keyring}", f"--components={components}"]
    if system == "ubuntu":
        # apt's own account may not read the keyring in our cache. The root file system keeps no such option.
        options.append('--aptopt=APT::Sandbox::User "root"')
        options.append('--customize-hook=rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap"')
    options += [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
    log, env = state.log("root"), state.environment()

    def watch(line: str) -> None:
        if line.startswith(("I: ", "Get:", "Unpacking ", "Setting up ")):
            progress.now("root", f"{title}: {line.removeprefix('I: ')[:60]}")

    with tempfile.TemporaryDirectory() as tmp:
        tar = Path(tmp) / "base.tar"
        argv: list[str | Path] = [
            *sudo(),
            "mmdebstrap",
            "--verbose",
            "--variant=minbase",
            *options,
            release,
            tar,
            *archive,
        ]
        run_logged(argv, log, env, "mmdebstrap", watch=watch)
        progress.now("root", f"{title}: podman import")
        run_logged([*sudo(), "podman", "import", "--quiet", tar, image], log, env, "podman import")


def disk_growth() -> Callable[[], str]:
    """Say how much the disk has filled since now: podman itself prints nothing for half a minute."""
    before = shutil.disk_usage("/var").used
    return lambda: f"writing the image: {max(0, shutil.disk_usage('/var').used - before) / 1e6:.0f} MB on the disk"


def bake(
    state: State,
    cluster: Cluster,
    base: str,
    image: str,
    variables: dict[str, str],
    wheels: dict[str, Path],
    progress: Progress,
) -> None:
    """Boot a builder from base, run image.yml on it and commit it as image."""
    name = f"{cluster.name}-build"
    address = BUILD_SUBNET.replace("0/24", "10")
    spec = {
        **{"cluster": name, "name": "builder", "addresses": {"management": address}, "ssh_port": 22},
        **{"image": base, "state_dir": str(state.dir)},
        # Mounted packages are not copied and do not enter the image.
        "mounts": {str(path): ON_NODE[name] for name, path in wheels.items()},
    }
    network = {"cluster": name, "name": f"{name}-management", "subnet": BUILD_SUBNET, "internal": False}
    network["state_dir"] = str(state.dir)
    (CACHE / "horovod").mkdir(parents=True, exist_ok=True)
    log, env, container = state.log("image"), state.environment(), f"{name}-builder"

    def tool(action: str, value: dict[str, object]) -> None:
        given = env | {"INPUT": json.dumps(value)}
        run_logged([sys.executable, "-m", NODE_TOOL, action], log, given, f"builder: {action}")

    def podman(*words: str) -> None:
        run_logged([*sudo(), "podman", *words], log, env, f"podman {words[0]}")

    tool("remove-leftovers", spec)
    tool("remove-dead-build", network)
    try:
        with progress.part("image", "booting a node to install the roles on"):
            tool("create-network", network)
            tool("create-node", spec)
        options = ssh.connection_options(state.known_hosts)
        inventory = state.dir / "builder.ini"
        inventory.write_text(
            f"builder ansible_host={address} ansible_user=ops ansible_ssh_private_key_file={state.key} "
            f"ansible_ssh_common_args='{' '.join(options)}' ansible_python_interpreter=/usr/bin/python3\n"
        )
        values = json.dumps(node_variables(state, cluster) | variables | {"image_packages": sorted(packages(cluster))})
        argv: list[str | Path] = ["ansible-playbook", "-i", inventory, ROOT / "ansible/image.yml", "-e", values]
        login = ["ssh", "-o", "BatchMode=yes", "-i", str(state.key), *options, f"ops@{address}"]
        with background.shown([login], progress), progress.part("roles", "starting Ansible", "roles installed"):
            show = PlaybookTasks(lambda text: progress.now("roles", text))
            run_logged(argv, log, env, "ansible/image.yml", watch=show)
        with progress.part("image", "stopping the node"):
            podman("stop", "-t", "20", container)
        with progress.part("image", "writing the image", "image written"), progress.polled("image", disk_growth()):
            podman("commit", "--quiet", container, image)
    finally:
        with progress.part("image", "removing the node"):
            tool("destroy-node", spec)
            tool("remove-leftovers", spec)
        (state.dir / "builder.ini").unlink(missing_ok=True)
