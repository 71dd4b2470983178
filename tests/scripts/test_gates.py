"""The gates of the GPU kernels: what they record, and what they read of the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.gate_device import spills


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


REPORT = """\
ptxas info    : Compiling entry function 'paged_attention_merge' for 'sm_89'
ptxas info    : Function properties for paged_attention_merge
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 440 bytes cmem[0]
ptxas info    : Function properties for paged_attention_split
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 186 registers, used 1 barriers
"""


def test_only_kernels_that_spill_are_named():
    """The bytes are those that a thread stores."""
    assert spills(REPORT) == {"paged_attention_merge": 4}


@pytest.mark.release
@pytest.mark.parametrize("more", [["--device", "a100"], ["--no-steps"], ["--only", "fused"]])
def test_only_all_steps_on_an_h100_are_written_down(more):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.kernel_gate", "--write", *more],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "everything on an H100" in done.stderr
