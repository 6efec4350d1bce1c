import json
import re
import shlex

from cluster.core.config import versions

PYTHON = "/opt/horovod/bin/python"
# stack -> torch with its CUDA, package of NCCL
STACKS = {
    "13": (f"{versions()['torch']}+cu130 13.0 False", "nvidia-nccl-cu13"),
    "12": (f"{versions()['torch_cuda12']}+cu126 12.6 False", "nvidia-nccl-cu12"),
}
ALLREDUCE = """
import json
import torch
import horovod.torch as hvd
hvd.init()
mine = torch.arange(100_000, dtype=torch.float64) * (hvd.rank() + 1)
total = hvd.allreduce(mine, op=hvd.Sum, name="total")
error = (total - torch.arange(100_000, dtype=torch.float64) * 3).abs().max().item()
if hvd.rank() == 0:
    print("RESULT", json.dumps({"size": hvd.size(), "error": error, "mpi": hvd.mpi_enabled()}))
"""
# Through Horovod's own library, to get the NCCL that it is linked with.
NCCL = """
import ctypes, torch, horovod.torch.mpi_lib_v2 as horovod
number = ctypes.c_int()
code = ctypes.CDLL(horovod.__file__).ncclGetVersion(ctypes.byref(number))
print(code, number.value)
"""


def stack(nodes):
    return "12" if nodes.scenario.name == "cuda12" else "13"


def python(nodes, program):
    done = nodes.as_user("head", f"{PYTHON} -c {shlex.quote(program)}")
    assert done.rc == 0, done.stderr
    return done.stdout.strip()


def test_check_build_lists_nccl_mpi_and_gloo(nodes):
    text = nodes.as_user("head", "horovodrun --check-build").stdout
    assert {"PyTorch", "NCCL", "MPI", "Gloo"} <= set(re.findall(r"\[X\] (\w+)", text)), text


def test_torch_is_the_cuda_build_and_reports_no_gpu(nodes):
    text = python(nodes, "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())")
    assert text == STACKS[stack(nodes)][0]


def test_horovod_is_linked_with_the_nccl_that_torch_uses(nodes):
    package = STACKS[stack(nodes)][1]
    installed = python(nodes, f"from importlib.metadata import version; print(version('{package}'))")
    major, minor, patch = map(int, installed.split("."))
    assert python(nodes, NCCL) == f"0 {10000 * major + 100 * minor + patch}"


def test_allreduce_over_mpi_is_correct_on_two_ranks(nodes):
    done = nodes.as_user("head", f"mpirun -np 2 -H head:2 {PYTHON} -c {shlex.quote(ALLREDUCE)}")
    found = re.search(r"RESULT (\{.*\})", done.stdout)
    assert found, done.stdout + done.stderr
    assert json.loads(found[1]) == {"size": 2, "error": 0, "mpi": True}


def test_kernels_exist_for_the_gpus_that_torch_supports(nodes):
    """Compare the kernels in Horovod's library with the architectures that torch lists."""
    wanted = set(python(nodes, "import torch; print(*torch._C._cuda_getArchFlags().split())").split())
    library = python(nodes, "import torch, horovod.torch.mpi_lib_v2 as found; print(found.__file__)")
    text = nodes["head"].check_output(f"grep -aoE 'sm_[0-9]+' {library} | sort -u")
    assert {name for name in wanted if name.startswith("sm_")} <= set(text.split()), (wanted, text)


def test_no_package_is_left_behind(nodes):
    left = nodes["head"].check_output(r"find / -xdev \( -name '*.whl' -size +1M -o -name 'horovod-*.tar.gz' \)")
    assert [path for path in left.split() if "/python-wheels/" not in path] == []
