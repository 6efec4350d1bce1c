"""`text | gpu_driver(node, stack, headers)`: what the driver role does on a node with this output of look.sh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Molecule and Ansible start in other folders.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from cluster import gpus


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"gpu_driver": lambda text, node, stack, headers: gpus.choice(node, text, stack, headers)}
