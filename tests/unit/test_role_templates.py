"""Templates of roles for hardware that the tests do not have."""

from __future__ import annotations

import hashlib

import jinja2
import yaml

from cluster.core.config import ROOT

FABRIC = {"subnet": "10.0.1.0/24", "interface": "ib0", "rate_gbps": 100, "shaped": False}


def parameters(transport: str, **changes: object) -> dict[str, str]:
    path = ROOT / "roles/mpi/templates/openmpi-mca-params.conf.j2"
    variables = {
        **{"contract_fabrics": {"f": {**FABRIC, "transport": transport}}, "contract_active_fabric": "f"},
        **{"contract_provider": "baremetal", "mpi_ports_first": 20000, "mpi_ports_count": 10000, "mpi_hca": ""},
        **{"inventory_hostname": "head", "groups": {"head": ["head"]}},
        **{"tuning": {"mca": {}, "number": 0}, **changes},
    }
    text = jinja2.Environment(  # noqa: S701 (no HTML)
        trim_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(path.read_text())
    lines = text.render(variables).splitlines()
    return dict(line.split(" = ") for line in lines if line and not line.startswith("#"))


def test_mpi_uses_ucx_and_nothing_else_on_verbs():
    found = parameters("verbs")
    assert (found["pml"], found["btl"]) == ("ucx", "self,vader")
    assert "mca_base_env_list" not in found
    assert parameters("verbs", mpi_hca="mlx5_1:1")["mca_base_env_list"] == "UCX_NET_DEVICES=mlx5_1:1"


def test_mpi_uses_libfabric_and_nothing_else_on_efa():
    found = parameters("efa")
    assert (found["pml"], found["mtl"], found["mtl_ofi_provider_include"]) == ("cm", "ofi", "efa")
    assert (found["btl"], "btl_tcp_if_include" in found) == ("self,vader", False)


def test_mpi_uses_only_the_subnet_on_tcp():
    found = parameters("tcp")
    assert (found["pml"], found["btl"], found["btl_tcp_if_include"]) == ("ob1", "tcp,self,vader", "10.0.1.0/24")


def build_id(**changes: str) -> str:
    """The key of Horovod's compiled wheel, as roles/horovod derives it."""
    tasks = yaml.safe_load((ROOT / "roles/horovod/tasks/install.yml").read_text())
    (task,) = [task for task in tasks if task["name"].startswith("Derive the build id")]
    values = {"horovod_device": "cpu", "horovod_torch_version": "2.13.0", "horovod_arch_flags": "", "lock": "a"}
    values |= {"toolchain": "python3 3.11.2", "edits": "one", "role_path": "/roles/horovod", **changes}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)  # noqa: S701 (no HTML)
    environment.filters["hash"] = lambda text, kind: hashlib.new(kind, text.encode()).hexdigest()
    variables = {**values, "horovod_toolchain": {"stdout": values["toolchain"]}, "horovod_lock": "nodes.lock"}
    texts = {"nodes.lock": values["lock"], "/roles/horovod/tasks/compile.yml": values["edits"]}
    variables["lookup"] = lambda plugin, path: texts[path]
    for name in ("horovod_cuda_build", "horovod_edits", "horovod_versions"):
        variables[name] = environment.from_string(task["vars"][name]).render(variables)
    return environment.from_string(task["ansible.builtin.set_fact"]["horovod_build"]).render(variables)


def test_wheel_is_compiled_again_for_another_cpu_level_python_torch_cuda_lock_or_edit_of_the_source():
    builds = [
        build_id(),
        build_id(horovod_arch_flags="-march=x86-64-v2"),
        build_id(horovod_arch_flags="-march=x86-64-v3"),
        build_id(toolchain="python3 3.13.5"),
        build_id(horovod_torch_version="2.7.1"),
        build_id(edits="another"),
        build_id(horovod_device="cuda"),
        build_id(horovod_device="cuda", lock="b"),
    ]
    assert len(set(builds)) == len(builds)
    assert build_id(lock="b") == builds[0] == build_id()
