"""Templates of roles for hardware that the tests do not have."""

from __future__ import annotations

import jinja2

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
