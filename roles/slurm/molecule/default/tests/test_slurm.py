import shlex
import time

SLURM = ("slurmd", "slurmctld", "munge")
PATHS = "/etc/slurm /etc/munge /var/lib/slurm /var/lib/munge /var/log/slurm /var/log/munge /run/slurmd"


def slurm(nodes, command, name="head"):
    """A command of Slurm as the training account, with a limit: a job that cannot start would wait for ever."""
    return nodes.as_user(name, f"timeout 60 {command}")


def wait_idle(nodes, seconds=90):
    deadline = time.monotonic() + seconds
    while (found := slurm(nodes, "sinfo -h -N -p all -o %N=%T").stdout.split()) != ["head=idle", "w1=idle"]:
        assert time.monotonic() < deadline, found
        time.sleep(1)


def test_a_job_runs_on_both_nodes(nodes):
    done = slurm(nodes, "srun -p all -N 2 --kill-on-bad-exit=1 hostname")
    assert sorted(done.stdout.split()) == ["head", "w1"], done.stderr


def test_mpirun_in_a_job_starts_its_ranks_through_slurm(nodes):
    # Without its key the head cannot log in to the worker.
    hide = "mv /home/horovod/.ssh/id_ed25519 /home/horovod/hidden"
    nodes["head"].check_output(hide)
    try:
        done = slurm(nodes, "salloc -p all -N 2 --ntasks-per-node=1 mpirun -np 2 -map-by slot mpi-hello")
    finally:
        nodes["head"].check_output("mv /home/horovod/hidden /home/horovod/.ssh/id_ed25519")
    assert '"ranks": 2, "sum": 1, "wrong": 0' in done.stdout, done.stderr


def test_head_without_gpus_is_outside_the_default_partition(nodes):
    found = dict(line.split() for line in slurm(nodes, "sinfo -h -o '%P %N'").stdout.splitlines())
    assert found == {"main*": "w1", "all": "head,w1"}
    refused = slurm(nodes, "srun -N 2 true")
    assert refused.rc != 0
    assert "Unable to allocate resources" in refused.stderr, refused.stderr


def test_a_job_gets_only_the_gpus_of_the_type_that_it_requested(nodes):
    show = "sh -c 'echo $CUDA_VISIBLE_DEVICES on $(hostname)'"
    assert slurm(nodes, "srun --gres=gpu:p100:1 " + show).stdout.split() == ["0", "on", "w1"]
    assert slurm(nodes, "srun --gpus-per-node=2 " + show).stdout.split() == ["0,1", "on", "w1"]
    for too_much in ("gpu:p100:3", "gpu:v100:1"):
        refused = slurm(nodes, f"srun --gres={too_much} true")
        assert refused.rc != 0
        assert "Unable to allocate resources" in refused.stderr, refused.stderr


def test_jobs_wait_for_nodes_that_others_use(nodes):
    wait_idle(nodes)
    first = slurm(nodes, "sbatch --parsable -p all -N 2 --exclusive -o /dev/null --wrap 'sleep 60'").stdout.strip()
    state, second, deadline = f"squeue -h -o %T -j {first}", "", time.monotonic() + 30
    try:
        while (found := slurm(nodes, state).stdout.strip()) != "RUNNING":
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        second = slurm(nodes, "sbatch --parsable -p all -N 1 -o /dev/null --wrap true").stdout.strip()
        time.sleep(3)
        states = dict(line.split() for line in slurm(nodes, "squeue -h -o '%i %T'").stdout.splitlines())
        assert states == {first: "RUNNING", second: "PENDING"}
    finally:
        slurm(nodes, f"scancel {first} {second}")
    wait_idle(nodes)


def test_a_node_with_another_key_is_refused(nodes):
    nodes["w1"].check_output("cp -p /etc/munge/munge.key /root/kept; head -c 64 /dev/urandom > /etc/munge/munge.key")
    nodes["w1"].check_output("systemctl restart munge")
    try:
        done = slurm(nodes, "sinfo", "w1")
        assert done.rc != 0, done.stdout
    finally:
        nodes["w1"].check_output("mv /root/kept /etc/munge/munge.key; systemctl restart munge")
    assert slurm(nodes, "sinfo", "w1").rc == 0


def test_key_is_readable_by_munge_only(nodes):
    file = nodes["w1"].file("/etc/munge/munge.key")
    assert (file.user, file.mode) == ("munge", 0o400)
    assert file.sha256sum == nodes["head"].file("/etc/munge/munge.key").sha256sum


def test_jobs_run_again_after_a_restart_of_all_nodes(nodes):
    for name in ("head", "w1"):
        nodes.restart(name)
    wait_idle(nodes)
    assert slurm(nodes, "srun -p all -N 2 true").rc == 0


def test_a_removed_node_leaves_the_partitions(nodes):
    assert nodes.apply("configure", without="w1").returncode == 0
    assert slurm(nodes, "sinfo -h -o '%P %N'").stdout.split() == ["main*", "head"]
    assert nodes.apply("configure").returncode == 0
    wait_idle(nodes)


def test_removal_ends_jobs_and_leaves_nothing_behind(nodes):
    slurm(nodes, "sbatch -p all -N 2 -o /dev/null --wrap 'srun sleep 1234'")
    for name in ("head", "w1"):
        nodes[name].check_output("timeout 30 sh -c 'until pgrep -f \"[s]leep 1234\"; do sleep 0.5; done'")
    done = nodes.apply("remove")
    assert done.returncode == 0, done.stdout
    for name in ("head", "w1"):
        assert nodes[name].run(f"ls -d {PATHS} /etc/horovod-cluster/slurm-*").stdout == ""
        assert nodes[name].run("pgrep -x 'munged|slurmd|slurmctld|slurmstepd'").stdout == ""
        assert nodes[name].run("pgrep -f '[s]leep 1234'").stdout == "", name
        assert nodes[name].run("getent passwd slurm munge").stdout == ""
        assert "slurm" not in nodes[name].check_output("dpkg --get-selections"), name
        for unit in SLURM:
            assert nodes[name].run(shlex.join(["systemctl", "cat", unit])).rc != 0, unit
