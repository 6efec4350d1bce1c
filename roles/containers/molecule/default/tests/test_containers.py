import json
import shlex
import tarfile

from bench.sweep.launch import Launch, SpecFile

IMAGE = "localhost/horovod-cluster-molecule-busybox:1"
NODES = ("head", "w1")


def inside():
    """The podman command with which the bench starts a worker."""
    launch = Launch("run", "horovod-mpi", NODES, 1, "", "fabric0", SpecFile("/x", "y"), container=IMAGE)
    return shlex.join(launch.container_command)


def test_mpirun_starts_the_bench_in_a_container_on_each_node(nodes):
    for name in NODES:
        nodes[name].check_output("mkdir -p /opt/bench-worker")
    show = "/busybox sh -c 'echo $OMPI_COMM_WORLD_RANK of $(/busybox hostname) has $(/busybox ls /)'"
    done = nodes.as_user("head", f"mpirun -H head:1,w1:1 {inside()} {show}")
    found = sorted(line for line in done.stdout.splitlines() if " has " in line)
    assert [line.split(" has ")[0] for line in found] == ["0 of head", "1 of w1"], done.stdout + done.stderr
    # The image contains one program. Anything else would come from the node.
    assert all("busybox" in line and "home" not in line for line in found)


def test_devices_settings_and_limits_of_the_node_reach_a_rank(nodes):
    nodes["w1"].check_output("mkdir -p /opt/bench-worker /dev/infiniband")
    nodes["w1"].check_output("test -e /dev/infiniband/uverbs0 || mknod -m 666 /dev/infiniband/uverbs0 c 1 3")
    nodes["w1"].check_output("echo NCCL_IB_TC=106 > /etc/nccl.conf")
    outside = nodes.as_user("w1", "sh -c 'ulimit -Hl; ulimit -Hn; df /dev/shm | tail -n 1'").stdout
    show = "ulimit -Hl; ulimit -Hn; /busybox df /dev/shm | /busybox tail -n 1; /busybox cat /etc/nccl.conf; "
    show += "/busybox test -c /dev/infiniband/uverbs0 && echo adapter"
    try:
        inner = nodes.as_user("w1", f"{inside()} /busybox sh -c {shlex.quote(show)}")
    finally:
        nodes["w1"].check_output("rm -rf /dev/infiniband /etc/nccl.conf")
    lines, wanted = inner.stdout.splitlines(), outside.splitlines()
    assert lines[:2] == wanted[:2], inner.stdout + inner.stderr
    # The node's own shared memory, of the same size.
    assert lines[2].split()[1] == wanted[2].split()[1]
    assert lines[3:] == ["NCCL_IB_TC=106", "adapter"]


def test_root_in_a_container_is_the_training_account_outside(nodes):
    def run(folder, command):
        options = f"--rm --network=host --pid=host --ipc=host --volume={folder}:/out"
        return nodes.as_user("w1", f"podman run {options} {IMAGE} /busybox {command}")

    assert run("/home/horovod", "id -u").stdout.strip() == "0"
    assert run("/home/horovod", "touch /out/made").rc == 0
    assert nodes["w1"].file("/home/horovod/made").user == "horovod"
    assert "Permission denied" in run("/etc", "touch /out/made").stderr


def test_image_on_the_nodes_is_the_archived_one(nodes, scenario):
    with tarfile.open(scenario.state.dir / "busybox.tar") as tar:
        (entry,) = json.load(tar.extractfile("manifest.json"))
    for name in NODES:
        found = nodes.as_user(name, f"podman image inspect --format {{{{.Id}}}} {IMAGE}").stdout.strip()
        assert found
        assert found in entry["Config"]
        assert nodes[name].run("ls /var/tmp/*.tar").stdout == ""


def test_image_named_by_a_tag_is_refused(nodes):
    for image in ("docker.io/library/busybox:latest", "busybox@sha256:1234", "busybox"):
        done = nodes.apply("install", check=True, containers_image=image)
        assert done.returncode != 0
        assert f"containers_image: {image} has no digest; write REGISTRY/NAME@sha256:DIGEST" in done.stdout


def test_image_name_without_a_registry_is_refused(nodes):
    done = nodes.as_user("head", "podman pull busybox")
    assert done.rc != 0
    assert "did not resolve to an alias" in done.stderr, done.stderr


def test_registry_without_tls_is_refused(nodes):
    nodes["w1"].check_output("systemd-run --unit=plain-registry python3 -m http.server 5000")
    try:
        ready = "timeout 20 sh -c 'until ss -tln | grep -q :5000; do sleep 0.2; done'"
        nodes["w1"].check_output(ready)
        done = nodes.as_user("head", f"podman pull w1:5000/training@sha256:{64 * '0'}")
    finally:
        nodes["w1"].check_output("systemctl stop plain-registry")
    assert done.rc != 0
    assert "does not look like a TLS handshake" in done.stderr, done.stderr


def test_removal_leaves_nothing_behind(nodes):
    assert nodes.apply("remove").returncode == 0
    assert nodes["w1"].run("which podman crun").stdout == ""
    assert nodes["w1"].run("ls -d /etc/containers /home/horovod/.local/share/containers").stdout == ""
