import re

import pytest

EXPORTS = "/etc/exports.d/horovod-cluster.exports"
SQUASH = {"root_squash": "Root_Squash", "no_root_squash": "No_Root_Squash"}
ACCESS = {"rw": "RW", "ro": "RO"}


def exported(nodes):
    """The role's exports, as (folder, client, options) per line."""
    lines = nodes["head"].check_output(f"cat {EXPORTS}").splitlines()
    return [re.fullmatch(r"(\S+) (\S+)\((\S+)\)", line).groups() for line in lines if line[0] != "#"]


def configuration(nodes):
    """The same exports as a configuration of NFS-Ganesha, a user-space server."""
    host = nodes["head"].check_output("awk -F= '$1 == \"host\" {print $2}' /etc/nfs.conf.d/horovod-cluster.conf")
    text = f"NFS_Core_Param {{ Protocols = 4; Bind_addr = {host}; }}\n"
    text += "NFSv4 { Graceless = true; Grace_Period = 1; Lease_Lifetime = 1; }\n"
    (folder,) = {folder for folder, _, _ in exported(nodes)}
    text += f"EXPORT {{ Export_Id = 1; Path = {folder}; Pseudo = {folder}; Access_Type = None; FSAL {{ Name = VFS; }}\n"
    for _, client, given in exported(nodes):
        options = given.split(",")
        access, squash = (next(known[o] for o in options if o in known) for known in (ACCESS, SQUASH))
        text += f"CLIENT {{ Clients = {client}; Access_Type = {access}; Squash = {squash}; }}\n"
    return text + "}\n"


@pytest.fixture(scope="module", autouse=True)
def server(nodes):
    head = nodes["head"]
    wait = "timeout 30 sh -c 'until {}; do sleep 0.2; done'"
    assert nodes.run("head", wait.format("mountpoint -q /shared")).rc == 0
    head.check_output("systemctl stop nfs-ganesha.service nfs-server.service nfs-mountd.service")
    head.check_output(f"mkdir -p /run/ganesha && cat > /run/ganesha/test.conf <<'END'\n{configuration(nodes)}END")
    start = "systemd-run --quiet --collect --unit=ganesha -p KillMode=control-group"
    head.check_output(
        f"{start} ganesha.nfsd -F -f /run/ganesha/test.conf -L /run/ganesha/log -N EVENT -p /run/ganesha/pid"
    )
    done = nodes.run("head", wait.format("ss -Hltn sport = 2049 | grep -q ."))
    assert done.rc == 0, head.check_output("tail -n 30 /run/ganesha/log")
    yield
    head.run("systemctl stop ganesha")


def url(nodes, file, user=1500):
    return f"'nfs://{nodes.address('head')}/srv/share/nfs/{file}?version=4&uid={user}&gid={user}'"


def read(nodes, file):
    return nodes.run("w1", f"nfs-cat {url(nodes, file)}")


def write(nodes, source, file, user=1500):
    return nodes.run("w1", f"nfs-cp {source} {url(nodes, file, user)}")


def test_worker_reads_what_the_head_writes(nodes):
    assert nodes.as_user("head", "echo one > /shared/results/from-head").rc == 0
    done = read(nodes, "results/from-head")
    assert done.stdout == "one\n", done.stderr


def test_head_reads_what_a_worker_writes(nodes):
    done = write(nodes, "/etc/hostname", "results/from-w1")
    assert done.rc == 0, done.stderr
    assert nodes.as_user("head", "cat /shared/results/from-w1").stdout.strip() == "w1"
    assert nodes["head"].check_output("stat -c %U /shared/results/from-w1") == "horovod"


def test_root_on_a_worker_is_mapped_to_nobody(nodes):
    assert write(nodes, "/etc/hostname", "results/from-root", user=0).rc != 0
    assert not nodes["head"].file("/shared/results/from-root").exists


def test_unknown_address_on_the_fabric_cannot_read(nodes):
    with nodes.stranger("w1", to="head"):
        assert read(nodes, "results/from-head").rc != 0
    assert read(nodes, "results/from-head").stdout == "one\n"


def test_full_share_gives_a_clear_error(nodes):
    nodes["w1"].check_output("truncate -s 32M /root/big")
    assert write(nodes, "/root/big", "results/big").rc != 0
    done = nodes.as_user("head", "dd if=/dev/zero of=/shared/results/more bs=1M count=32")
    assert "No space left on device" in done.stderr
    nodes["head"].check_output("rm /shared/results/big /shared/results/more")


def test_worker_requests_the_share_and_retries(nodes):
    """The kernel has no NFS. This proves that mount(8) accepts the request and that the unit retries."""
    ask = '. /etc/horovod-cluster/storage; mount -f -v -t "$TYPE" -o "$OPTIONS" "$WHAT" "$WHERE"'
    done = nodes.run("w1", f"sh -c '{ask}'")
    assert done.rc == 0, done.stderr
    assert f"addr={nodes.address('head')}" in done.stdout
    assert "nconnect=8" in done.stdout
    tries = "systemctl show -P NRestarts shared-storage"
    before = int(nodes["w1"].check_output(tries))
    again = f"timeout 60 sh -c 'until [ $({tries}) -gt {before} ]; do sleep 0.5; done'"
    assert nodes.run("w1", again).rc == 0, "the unit does not retry"
    for name in nodes.names:
        assert nodes.run(name, "systemd-analyze verify shared-storage.service nfs-server.service").rc == 0


def test_server_has_threads_for_all_workers(nodes):
    # The tool with which nfs-server.service reads its settings.
    assert nodes["head"].check_output("nfsconf --get nfsd threads") == "64"


def test_removed_node_is_no_longer_in_the_exports(nodes):
    assert nodes.address("w1") in {client for _, client, _ in exported(nodes)}
    assert nodes.apply("configure", without="w1").returncode == 0
    assert exported(nodes) == []


def test_removal_leaves_only_the_data(nodes):
    done = nodes.apply("remove")
    assert done.returncode == 0, done.stdout
    for name in nodes.names:
        assert nodes.run(name, "mountpoint -q /shared").rc != 0
        assert nodes[name].check_output("dpkg-query -W -f '${Package}\\n' | grep nfs-kernel-server | cat") == ""
        assert (
            nodes[name].check_output("find /etc /usr/local -name '*shared-storage*' -o -name horovod-cluster.exports")
            == ""
        )
    assert nodes["head"].file("/srv/share/nfs/results/from-head").content_string == "one\n"
