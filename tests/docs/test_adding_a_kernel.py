"""The worked example of docs/adding_a_kernel.md, built from the blocks of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, package_with, run_with

# A script for the copy. It runs in a separate process, in which `jaxserve.kernels` is the copy.
PROGRAM = """
import re
import sys
import jax
import numpy as np
import jaxserve.kernels
from jaxserve.kernels import dispatch
from jaxserve.kernels.configurations import CONFIGURATIONS
from jaxserve.kernels.cross import targeting
from jaxserve.kernels.soft_cap import soft_cap

assert jaxserve.kernels.__file__.startswith(sys.argv[1]), jaxserve.kernels.__file__
random = np.random.default_rng(0)
for rows, width, dtype in ((1, 1, "float32"), (3, 1025, "float32"), (2, 97, "bfloat16")):
    x = jax.numpy.asarray(random.normal(0, 40, (rows, width)), dtype)
    wanted = 30 * np.tanh(np.asarray(x, np.float64) / 30)
    for name in ("xla", "triton_interpreted"):
        found = soft_cap(x, cap=30.0, implementation=name)
        assert found.dtype == x.dtype
        tolerance = 1e-5 if dtype == "float32" else 0.1
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance)
soft_cap(x, cap=30.0)
assert dispatch.choices()[-1].implementation == "xla"
try:
    soft_cap(x, cap=30.0, implementation="triton")
except NotImplementedError as error:
    assert "NVIDIA GPUs" in str(error), error
mine = [each for each in CONFIGURATIONS if str(each).startswith("soft_cap-")]
for each in mine:
    function, arguments = each.call()
    with targeting():
        traced = jax.jit(function).trace(**arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r'name = "(\\w+)"', text)) == each.kernels
print("lowered", len(mine))
"""


@pytest.mark.fast
def test_the_example_changes_one_file_beside_its_folder():
    """The page adds the files of one folder, and one line to the list of configurations."""
    found = blocks("adding_a_kernel.md")
    assert [block.kind for block in found] == ["python"] * 5 + ["diff"]
    assert {Path(block.path).parent.name for block in found[:-1]} == {"soft_cap"}


@pytest.mark.release
def test_the_example_agrees_and_is_lowered(tmp_path: Path):
    """The interpreted kernel agrees with float64, the platform chooses, and GPUs get the kernel."""
    package = package_with("adding_a_kernel.md", tmp_path)
    assert run_with(package, PROGRAM) == "lowered 2"
