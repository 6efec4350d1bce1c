"""notebooks/scaling.ipynb, executed as Jupyter would."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from report_cases import RUNS

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "scaling.ipynb"


@pytest.mark.parametrize("name", ["engines", "one-node"])
def test_notebook_redraws_the_plots(name: str, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_RUN", str(RUNS / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [text for output in outputs if (text := output.get("data", {}).get("image/svg+xml"))]
    assert len(pictures) == (6 if name == "engines" else 4)
    assert all("EMULATED P100" in picture and "<path" in picture for picture in pictures)
    assert any("emulated P100" in output.get("data", {}).get("text/markdown", "") for output in outputs)


def test_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
