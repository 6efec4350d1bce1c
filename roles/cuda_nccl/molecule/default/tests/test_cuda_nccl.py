import shlex
import textwrap

# Load the library by name, as any program does. NCCL creates the unique id on the network that it selects.
ASK = """
import ctypes
nccl = ctypes.CDLL("libnccl.so.2")
number = ctypes.c_int()
assert nccl.ncclGetVersion(ctypes.byref(number)) == 0
print("version", number.value, flush=True)
nccl.ncclGetUniqueId(ctypes.create_string_buffer(128))
"""
KERNEL = """
#include <cuda_runtime.h>
#include <nccl.h>
__global__ void add(float *x) { x[threadIdx.x] += 1; }
int main() { int v; add<<<1, 1>>>(nullptr); return ncclGetVersion(&v); }
"""


def ask(nodes):
    done = nodes.run("head", f"env NCCL_DEBUG=INFO python3 -c {shlex.quote(ASK)}")
    return done.stdout + done.stderr


def test_library_loads_and_reports_the_locked_version(nodes):
    wanted = nodes["head"].check_output("sed -n 's/^nvidia-nccl-cu13==\\([0-9.]*\\).*/\\1/p' /opt/nccl/nccl.lock")
    major, minor, patch = map(int, wanted.split("."))
    assert f"version {10000 * major + 100 * minor + patch}" in ask(nodes)


def test_nccl_selects_the_fabric_and_not_the_management_network(nodes):
    text = ask(nodes)
    assert f"fabric0:{nodes.address('head')}" in text, text
    assert nodes.address("head", "management") not in text


def test_settings_follow_a_change_of_fabric(nodes):
    def fabric(transport):
        one = {"interface": "mgmt0", "subnet": "10.0.0.0/24", "rate_gbps": 100, "transport": transport, "shaped": False}
        chosen = {"contract_active_fabric": "other", "node_interfaces": {"other": "mgmt0"}}
        return {"contract_fabrics": {"other": one}, **chosen}

    try:
        assert nodes.apply("configure", **fabric("tcp")).returncode == 0
        assert f"mgmt0:{nodes.address('head', 'management')}" in ask(nodes)
        assert nodes["head"].file("/etc/nccl.conf").contains("NCCL_IB_DISABLE=1")
        assert nodes.apply("configure", **fabric("verbs")).returncode == 0
        text = nodes["head"].file("/etc/nccl.conf").content_string
        assert "NCCL_IB_HCA=mlx5" in text
        assert "NCCL_IB_DISABLE" not in text
    finally:
        assert nodes.apply("configure").returncode == 0
    assert f"fabric0:{nodes.address('head')}" in ask(nodes)


def test_cuda_program_that_uses_nccl_compiles(nodes):
    """With the compiler that builds nccl-tests on GPU nodes."""
    nodes["head"].check_output("apt-get install -qq --no-install-recommends g++ > /dev/null")
    nodes["head"].check_output("sh -c 'printf %%s \"$1\" > /tmp/add.cu' sh %s", textwrap.dedent(KERNEL))
    home = nodes["head"].check_output("ls -d /opt/nccl/lib/python3*/site-packages/nvidia")
    done = nodes.run(
        "head",
        f"{home}/cu13/bin/nvcc -arch=sm_75 -I{home}/nccl/include -L{home}/nccl/lib /tmp/add.cu -lnccl"
        " -o /tmp/add && ldd /tmp/add",
    )
    assert done.rc == 0, done.stderr
    assert f"libnccl.so.2 => {home}/nccl/lib/libnccl.so.2" in done.stdout


def test_removal_leaves_nothing_behind(nodes):
    assert nodes.apply("remove").returncode == 0
    assert "cannot open shared object" in ask(nodes)
    assert nodes["head"].run("ls -d /opt/nccl /etc/nccl.conf").stdout == ""
