"""Run notebooks from top to bottom, and keep their outputs and pictures in their files.

    python -m scripts.run_notebooks [notebooks/01_first_steps.ipynb ...]

Bars and logs are left out, and so are times of execution, so that a run changes only what differs.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_LIMIT_S = 600


def run(path: Path) -> Any:
    """Return the notebook with its outputs; raises CellExecutionError if a cell fails."""
    notebook: Any = nbformat.read(path, as_version=4)
    about = copy.deepcopy(notebook.metadata)  # a run adds the version of its Python
    # Optax, which a notebook calls directly, does not support strict promotion.
    env = os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    NotebookClient(notebook, timeout=_LIMIT_S, kernel_name="python3").execute(
        cwd=str(path.parent), env=env
    )
    notebook.metadata = about
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; by default all")
    paths = parser.parse_args().paths or NOTEBOOKS
    for path in tqdm(paths, unit="notebook", leave=False, delay=2):
        nbformat.write(run(path), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
