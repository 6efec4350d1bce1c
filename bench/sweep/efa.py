"""Amazon's EFA needs software that not every machine image has: without it every trial would fail its proof."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core import ssh
from cluster.core.contract import Contract
from cluster.core.errors import UserError

INSTALLED = "PATH=$PATH:/opt/amazon/efa/bin:/usr/sbin:/sbin; "
# fi_info ends with an error where the provider finds no adapter.
PROVIDER = 'fi_info -p efa > /dev/null 2>&1 || echo "libfabric\'s provider efa (fi_info -p efa)"; '
# NCCL loads it by its name only.
PLUGIN = "ldconfig -p | grep -q libnccl-net || echo 'the NCCL plugin aws-ofi-nccl (libnccl-net.so in ldconfig -p)'"
OPENMPI = "ompi_info | grep -q 'MCA mtl: ofi' || echo 'OpenMPI with libfabric (ompi_info: MCA mtl: ofi)'"


def require(contract: Contract, fabrics: Iterable[str], names: list[str], cuda: bool) -> None:
    """Raise UserError if a launch on one of these fabrics needs EFA and a node lacks what that needs."""
    found = [name for name in fabrics if name in contract.fabrics and contract.fabrics[name].transport == "efa"]
    if not found:
        return
    command = INSTALLED + PROVIDER + (PLUGIN if cuda else OPENMPI)
    missing: dict[str, list[str]] = {}
    for node, done in ssh.run_on_all(contract, names, command).items():
        for what in done.stdout.splitlines():
            missing.setdefault(what, []).append(node)
    if missing:
        lacks = "; ".join(
            f"{', '.join(nodes)} {'lacks' if len(nodes) == 1 else 'lack'} {what}" for what, nodes in missing.items()
        )
        fix = "use an AMI that has it (cluster.aws.ami), or transport tcp"
        raise UserError(f"cluster.fabrics.{found[0]}.transport: efa: {lacks}; {fix}")
