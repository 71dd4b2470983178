"""Compile the Mosaic kernels for a Hopper GPU without one; a part of `make kernel-gate`.

Every configuration is compiled to machine code for sm_90a. Errors are a register spill and more
shared memory than a block can have. The compiler's report is stored next to this script.

Rows of shared memory may be tiled by eight. A copy that does not begin at a multiple of eight
tokens would then be misplaced silently, so no copy of a run of tokens may use such tiles.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from scripts import kernel_gate  # before JAX, because it sets variables that JAX's import reads

import jax  # isort: skip
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # isort: skip
from tqdm import tqdm  # isort: skip

from jaxserve.kernels.gpu import GPUS  # isort: skip
from jaxserve.kernels.paged_attention.configurations import (  # isort: skip
    MOSAIC_CONFIGURATIONS,
    Configuration,
)

REPORT = Path(__file__).with_name("mosaic_resources.json")
_KERNELS = "paged_attention_mosaic"


def main() -> int:
    options = _parser().parse_args()
    mesh = kernel_gate.mesh_of()
    report: dict[str, dict[str, dict[str, int]]] = {}
    problems: list[str] = []
    chosen = MOSAIC_CONFIGURATIONS[:: 3 if options.subset else 1]
    for configuration in tqdm(chosen, desc="compiling Mosaic kernels", delay=2):
        try:
            report[str(configuration)] = _resources(mesh, configuration)
        except Exception as error:
            problems.append(f"{configuration}: {str(error).splitlines()[0]}")
    print(json.dumps({"Mosaic kernels": report}, indent=2))
    if options.write and not problems:
        REPORT.write_text(json.dumps(report, indent=2) + "\n")
    for problem in problems:
        print(f"mosaic-gate: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _resources(mesh: Mesh, configuration: Configuration) -> dict[str, dict[str, int]]:
    """Return the resources of a configuration's kernels by their names.

    Raises:
      ValueError: a kernel exceeds the device's resources, or its copies misplace tokens.
    """
    function, arguments = configuration.call()
    place = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
    )
    with tempfile.TemporaryDirectory(prefix="mosaic-gate-") as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        with jax.set_mesh(mesh):
            jax.jit(function).lower(**arguments).compile()
        written = sorted(Path(folder).glob(f"{_KERNELS}*.ptx"))
        if len(written) != (1 if configuration.is_decode else 2):
            raise ValueError(f"{len(written)} Mosaic kernels were compiled")
        return {_name_of(ptx): _resources_of(ptx) for ptx in written}


def _name_of(ptx: Path) -> str:
    found = re.match(rf"{_KERNELS}_([a-z]+)", ptx.name)
    assert found is not None
    return found[1]


def _resources_of(ptx: Path) -> dict[str, int]:
    assembler = ptx.with_suffix(".ptxas").read_text()
    shared = ptx.with_suffix(".resources.txt").read_text()
    copies = ptx.with_suffix(".after_layout_inference.txt").read_text()
    found = {
        "registers_at_launch": _number(r"Used (\d+) registers", assembler),
        "spill_bytes": _number(r"(\d+) bytes spill stores", assembler),
        "shared_bytes": _number(r"smem_scratch_bytes=(\d+)", shared),
        "wgmma": ptx.read_text().count("wgmma.mma_async"),
    }
    if found["spill_bytes"]:
        raise ValueError(f"{found['spill_bytes']} bytes of registers are spilled")
    if found["shared_bytes"] > GPUS["h100"].shared_bytes:
        raise ValueError(f"{found['shared_bytes']} bytes of shared memory")
    if misplaced := _misplaced(copies):
        raise ValueError(f"copies of tokens that have to begin at multiples of 8: {misplaced}")
    return found


def _misplaced(text: str) -> list[str]:
    """Return the copies whose tiled rows begin at an index other than the constant 0."""
    copies = [line for line in text.splitlines() if "mosaic_gpu.async_" in line]
    if len(copies) < 4:
        raise ValueError(f"the compiled code has only {len(copies)} copies")
    found = []
    for line in copies:
        tile = re.search(r"#mosaic_gpu\.tile<\[(\d+), \d+\]>", line)
        (text,) = re.findall(r"slice_lengths = array<i64: ([-\d, ]+)>", line)
        lengths = [int(length) for length in text.split(",")]
        indices = re.findall(r"%\w+", line[: line.index("<{")])[-len(lengths) :]
        # A length of -1 belongs to a single index. The last two other dimensions are tiled.
        begin, _ = [at for at, length in zip(indices, lengths, strict=True) if length > 0][-2:]
        if tile is not None and tile[1] != "1" and not begin.startswith("%c0_"):
            found.append(line.strip())
    return found


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's report has no {pattern!r}")
    return int(found.group(1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mosaic-gate", description=__doc__)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--subset", action="store_true", help="every third configuration")
    one.add_argument(
        "--write", action="store_true", help="record the compiler's report, unless one fails"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
