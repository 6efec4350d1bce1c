import time

import pytest

UNTIL = "timeout {seconds} sh -c 'until {condition}; do sleep 0.2; done'"


def wait(nodes, name, condition, seconds=180):
    assert nodes.run(name, UNTIL.format(condition=condition, seconds=seconds)).rc == 0, f"{name}: timeout: {condition}"


def wait_for_share(nodes):
    for name in nodes.names:
        wait(nodes, name, "systemctl -q is-active shared-storage && mountpoint -q /shared")


@pytest.fixture(scope="module", autouse=True)
def share(nodes):
    wait_for_share(nodes)


def write(nodes, name, file, text):
    done = nodes.as_user(name, f"echo {text} > /shared/results/{file}")
    assert done.rc == 0, done.stderr


def read(nodes, name, file):
    return nodes.as_user(name, f"cat /shared/results/{file}").stdout.strip()


def test_each_node_reads_what_the_other_writes(nodes):
    write(nodes, "head", "from-head", "one")
    assert read(nodes, "w1", "from-head") == "one"
    write(nodes, "w1", "from-w1", "two")
    assert read(nodes, "head", "from-w1") == "two"


def test_only_the_training_account_can_write_to_its_folders(nodes):
    for folder in ("datasets", "results", "notebooks", "examples", "runs", "packages", "venvs"):
        for name in nodes.names:
            assert nodes[name].check_output(f"stat -c '%U %a' /shared/{folder}") == "horovod 755"
    assert nodes["w1"].run("runuser -u nobody -- touch /shared/results/mine").rc != 0


@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_lock_held_by_one_node_blocks_the_other(nodes, lock):
    code = f'import fcntl; f = open("/shared/results/lock", "a"); fcntl.{lock}(f, fcntl.LOCK_EX | fcntl.LOCK_NB)'
    hold = f'{code}; open("/shared/results/held", "w").close(); import time; time.sleep(60)'
    nodes["w1"].check_output(f"systemd-run --quiet --collect --unit=holder --uid=horovod python3 -c '{hold}'")
    try:
        wait(nodes, "head", "test -e /shared/results/held")
        refused = nodes.as_user("head", f"python3 -c '{code}'")
        assert "BlockingIOError" in refused.stderr
    finally:
        nodes["w1"].check_output("systemctl stop holder")
        nodes["w1"].check_output("rm -f /shared/results/held")
    assert nodes.as_user("head", f"python3 -c '{code}'").rc == 0


def test_nothing_listens_on_the_management_network(nodes):
    rows = [line.split() for line in nodes["head"].check_output("ss -Hltnp").splitlines()]
    listening = {row[3].rpartition(":")[0] for row in rows if "gluster" in row[-1]}
    assert listening == {nodes.address("head")}


def mount_again(nodes, name):
    """Mount the share a second time, as a new client."""
    tried = nodes.run(
        name, "sh -c 'mkdir -p /mnt/again && mount -t glusterfs head:/share /mnt/again && ls /mnt/again/results'"
    )
    nodes.run(name, "umount -l /mnt/again")
    return tried.rc == 0


def test_unknown_address_on_the_fabric_cannot_mount(nodes):
    assert mount_again(nodes, "w1")
    with nodes.stranger("w1", to="head"):
        assert not mount_again(nodes, "w1")
    assert mount_again(nodes, "w1")


def test_full_share_gives_a_clear_error(nodes):
    nodes["head"].check_output("gluster --mode=script volume set share storage.reserve 99")
    try:
        for _ in range(60):
            done = nodes.as_user("w1", "dd if=/dev/zero of=/shared/results/big bs=1M count=1")
            if done.rc:
                break
            time.sleep(0.5)
        assert "No space left on device" in done.stderr
        assert read(nodes, "w1", "from-head") == "one"
    finally:
        nodes["head"].check_output("shared-storage allow")
    wait(nodes, "w1", "dd if=/dev/zero of=/shared/results/big bs=1M count=1")


def test_share_works_again_after_a_restart_of_its_server(nodes):
    nodes.restart("head")
    wait_for_share(nodes)
    wait(nodes, "w1", "test -e /shared/results/from-head")
    assert read(nodes, "w1", "from-head") == "one"
    write(nodes, "w1", "after", "three")
    assert read(nodes, "head", "after") == "three"


def test_node_that_boots_before_its_server_mounts_later(nodes):
    nodes["head"].check_output("systemctl stop glusterd; pkill -x glusterfsd; true")
    nodes.restart("w1")
    assert nodes.run("w1", "mountpoint -q /shared").rc != 0
    hidden = nodes.as_user("w1", "touch /shared/results")
    assert hidden.rc != 0
    nodes["head"].check_output("systemctl start glusterd")
    wait_for_share(nodes)
    assert read(nodes, "w1", "after") == "three"


def test_removed_node_can_no_longer_mount(nodes):
    assert nodes.apply("configure", without="w1").returncode == 0
    wait(nodes, "head", f"! gluster volume get share auth.allow | grep -q -w {nodes.address('w1')}")
    assert nodes.run("head", f"grep -r -w {nodes.address('w1')} /etc/horovod-cluster /var/lib/glusterd/vols").rc != 0
    assert not mount_again(nodes, "w1")
    assert nodes.apply("configure").returncode == 0
    wait(nodes, "head", f"gluster volume get share auth.allow | grep -q -w {nodes.address('w1')}")
    nodes["w1"].check_output("systemctl restart shared-storage")
    assert read(nodes, "w1", "after") == "three"


def test_existing_share_is_checked(nodes):
    """The same share, treated as one that the site has mounted."""
    done = nodes.apply("configure", shared_storage_backend="existing")
    assert done.returncode == 0, done.stdout
    nodes["head"].check_output("chown root /shared/datasets")
    assert "the account horovod cannot write there" in nodes.run("w1", "shared-storage check").stderr
    nodes["w1"].check_output("sed -i s,^WHERE=.*,WHERE=/run, /etc/horovod-cluster/storage")
    assert "/run: is on tmpfs, which is not shared between nodes" in nodes.run("w1", "shared-storage check").stderr
    nodes["w1"].check_output("sed -i s,^WHERE=.*,WHERE=/nowhere, /etc/horovod-cluster/storage")
    assert "/nowhere: no such folder" in nodes.run("w1", "shared-storage check").stderr
