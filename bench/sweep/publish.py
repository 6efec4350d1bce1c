"""Copy a run's trials and curves to the share, where JupyterLab's notebooks and TensorBoard find them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench import export
from bench.results import runs, store
from bench.sweep.progress import console
from cluster import transfer
from cluster.core.contract import Contract
from cluster.core.errors import InfraError


def to_share(contract: Contract, run: store.RunFolder) -> None:
    """A run is complete without it, so what fails is a warning."""
    name = run.folder.name
    target = f"{contract.storage.path}/results/sweeps/{name}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            export.write_tensorboard(runs.load(str(run.folder)), Path(folder))
            shutil.copy(run.trials_file, folder)
            transfer.copy(contract, f"{folder}/", transfer.address(contract, target))
    except (InfraError, OSError) as error:
        console.print(f"{target}: not copied to the share: {error}")
