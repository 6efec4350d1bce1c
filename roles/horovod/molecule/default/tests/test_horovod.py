import json
import re

PYTHON = "/opt/horovod/bin/python"
HOSTS = "-H head:1,w1:1"
PROGRAM = """
import json, socket
import torch
import horovod.torch as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(rank)
mine = torch.randn(100_000, dtype=torch.float64)
expected = torch.zeros_like(mine)
for other in range(size):
    torch.manual_seed(other)
    expected += torch.randn(100_000, dtype=torch.float64)
total = hvd.allreduce(mine, op=hvd.Sum, name="total")
mean = hvd.allreduce(mine, op=hvd.Average, name="mean")
error = max((total - expected).abs().max().item(), (mean - expected / size).abs().max().item())
hosts = hvd.allgather_object(socket.gethostname())
if rank == 0:
    print("RESULT", json.dumps({"size": size, "hosts": sorted(hosts), "error": error, "mpi": hvd.mpi_enabled()}))
"""


def write_program(nodes):
    for name in ("head", "w1"):
        nodes[name].check_output("sh -c 'printf %%s \"$1\" > /tmp/allreduce.py' sh %s", PROGRAM)


def result(done):
    found = re.search(r"RESULT (\{.*\})", done.stdout)
    assert found, done.stdout + done.stderr
    return json.loads(found[1])


def test_check_build_lists_pytorch_mpi_and_gloo(nodes):
    for name in ("head", "w1"):
        text = nodes.as_user(name, "horovodrun --check-build").stdout
        assert {"PyTorch", "MPI", "Gloo"} <= set(re.findall(r"\[X\] (\w+)", text)), f"{name}: {text}"


def test_allreduce_is_correct_under_mpirun(nodes):
    write_program(nodes)
    done = nodes.as_user("head", f"mpirun {HOSTS} {PYTHON} /tmp/allreduce.py")
    found = result(done)
    assert (found["size"], found["hosts"], found["mpi"]) == (2, ["head", "w1"], True)
    assert found["error"] < 1e-12


def test_allreduce_is_correct_under_horovodrun_with_gloo(nodes):
    write_program(nodes)
    done = nodes.as_user(
        "head", f"horovodrun --gloo --network-interface fabric0 -np 2 {HOSTS} {PYTHON} /tmp/allreduce.py"
    )
    found = result(done)
    assert (found["size"], found["hosts"], found["mpi"]) == (2, ["head", "w1"], False)
    assert found["error"] < 1e-12


def test_rendezvous_server_queues_many_connections(nodes):
    """Python queues five connections by default. Others are dropped and retried after one, two, then four seconds."""
    look = "'ss -Hltn sport = :$HOROVOD_GLOO_RENDEZVOUS_PORT'"
    done = nodes.as_user("head", f"horovodrun --gloo --network-interface fabric0 -np 2 {HOSTS} sh -c {look}")
    waiting = [int(line.split()[2]) for line in done.stdout.splitlines() if "LISTEN" in line]
    assert waiting, done.stdout + done.stderr
    assert waiting[0] > 1000, done.stdout


def test_horovodrun_refuses_a_node_with_another_host_key(nodes):
    """ssh expects the head's key from w1, as if an impostor had taken an address."""
    config = "/home/horovod/.ssh/config"
    nodes["head"].check_output(f"sh -c 'printf \"Host w1\\n HostKeyAlias head\\n\" > {config}; chown horovod {config}'")
    try:
        done = nodes.as_user("head", f"horovodrun --gloo --network-interface fabric0 -np 2 {HOSTS} hostname")
    finally:
        nodes["head"].check_output(f"rm {config}")
    assert done.rc != 0
    assert "Host key verification failed" in done.stdout + done.stderr


AGENT = """
import os, pathlib, socket, time
pathlib.Path(os.environ["RUNTIME_DIRECTORY"], "account").write_text(str(os.getuid()))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
    notify.connect(os.environ["NOTIFY_SOCKET"].replace("@", chr(0)))
    notify.send(b"READY=1")
time.sleep(60)
"""


def test_training_account_can_start_the_agent_of_a_run_as_itself_only(nodes):
    node = nodes["w1"]
    node.check_output("sh -c 'printf %%s \"$1\" > /tmp/agent.py' sh %s", AGENT)
    refused = nodes.as_user("w1", "sudo -n /usr/local/sbin/run-agent '1 --uid=root' /tmp/agent.py")
    assert refused.rc != 0 and "not a run" in refused.stderr
    assert nodes.as_user("w1", "sudo -n systemd-run true").rc != 0
    done = nodes.as_user("w1", "sudo -n /usr/local/sbin/run-agent 20260101-000000-abcd /tmp/agent.py")
    assert done.rc == 0, done.stderr
    folder = "/run/run-20260101-000000-abcd"
    assert node.check_output(f"cat {folder}/account") == node.check_output("id -u horovod")
    assert node.check_output(f"stat -c '%a %U' {folder}") == "700 horovod"
    node.check_output("systemctl stop run-20260101-000000-abcd")
    assert not node.file(folder).exists


def test_nothing_was_compiled(nodes):
    """prepare.yml removed Horovod from w1 and records every compiler call."""
    for name in ("head", "w1"):
        assert not nodes[name].file("/var/log/compiler-calls").exists, (
            nodes[name].file("/var/log/compiler-calls").content
        )


def test_compiler_call_is_recorded(nodes):
    nodes["w1"].check_output("sh -c 'cd /tmp && echo > empty.c && /usr/local/bin/gcc -c empty.c'")
    assert nodes["w1"].file("/var/log/compiler-calls").contains("gcc")
    nodes["w1"].check_output("rm /var/log/compiler-calls")


def test_no_package_is_left_behind(nodes):
    for name in ("head", "w1"):
        left = nodes[name].check_output(r"find / -xdev \( -name '*.whl' -size +1M -o -name 'horovod-*.tar.gz' \)")
        # Python's ensurepip contains a pip wheel.
        assert [path for path in left.split() if "/python-wheels/" not in path] == []


def test_modules_load_from_bytecode(nodes):
    """Root owns the venv, so every rank would compile a module without bytecode at every start."""
    done = nodes.as_user("w1", f"{PYTHON} -v -c 'import torch, horovod.torch' 2>&1 | grep -c '^# could not create'")
    assert done.stdout.strip() == "0", done.stdout
