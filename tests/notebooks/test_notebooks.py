"""Every notebook runs from top to bottom, in its own kernel, and is committed with its pictures."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest

from scripts.run_notebooks import NOTEBOOKS, run

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _outputs(notebook: Any) -> list[Any]:
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def _num_pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in _outputs(notebook))


@pytest.mark.fast
@each_notebook
def test_a_notebook_shows_what_it_gives(path):
    """The file has its outputs and pictures, no error, and no folder of a machine."""
    notebook = nbformat.read(path, as_version=4)
    assert _num_pictures(notebook)
    assert not [each for each in _outputs(notebook) if each.output_type == "error"]
    texts = [str(each.get("text", "")) + str(each.get("data", "")) for each in _outputs(notebook)]
    assert not re.findall(r"/(?:root|home|tmp|work|Users)/\w+", "".join(texts))


@pytest.mark.release
@each_notebook
def test_a_notebook_runs(path, smollm2_path):
    """No cell fails, and it has the pictures of its file."""
    assert _num_pictures(run(path)) == _num_pictures(nbformat.read(path, as_version=4))
