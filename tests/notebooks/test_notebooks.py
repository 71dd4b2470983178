"""Every notebook runs from top to bottom, in its own kernel."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.release

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, smollm2_path):
    """No cell fails, and the committed file holds no outputs."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "clear the outputs before committing"
    # Optax, which a notebook calls directly, does not support strict promotion.
    env = os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=str(path.parent), env=env)
    pictures = [o for cell in cells for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures
