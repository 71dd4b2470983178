"""The gates of the GPU kernels do not record partial runs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.release
@pytest.mark.parametrize("gate", ["kernel_gate", "mosaic_gate"])
def test_a_part_is_not_written_down(gate):
    """The record always covers every configuration."""
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{gate}", "--write", "--subset"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--subset: not allowed with argument --write" in done.stderr
