"""Compare the machine code of products of few and of many tokens; `make kernel-gate` runs it.

A row has the same bits in any batch only if the tensor cores run the same instructions for it. So
the compiled kernel of each product must have the same matrix instructions, in the same order, and
the same count of every other instruction on floating-point numbers, for any number of tokens.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

_DUMP = tempfile.TemporaryDirectory(prefix="jaxserve-rows-")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={_DUMP.name}", "--xla_dump_emitter_re=.*")
)

import jax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jaxserve.kernels.fused_matmul.row_shapes import CONFIGURATIONS, Configuration  # noqa: E402
from jaxserve.kernels.grouped_matmul.shapes import (  # noqa: E402
    INVARIANT_CONFIGURATIONS,
    GroupedShape,
)
from scripts.gate_device import mesh_of  # noqa: E402

_TOKENS = (1, 100, 2048)


def main() -> int:
    mesh, num_problems = mesh_of(), 0
    products: dict[Configuration | GroupedShape, None] = {
        replace(each, tokens=1): None for each in (*CONFIGURATIONS, *INVARIANT_CONFIGURATIONS)
    }
    for product in products:
        found = {tokens: _operations(mesh, replace(product, tokens=tokens)) for tokens in _TOKENS}
        first = found[_TOKENS[0]]
        if not first[0] and not first[1]:
            found[0] = ((), Counter({"no code was found": 1}))
        for tokens, own in found.items():
            if own != first:
                num_problems += 1
                print(f"row-gate: {product}: {tokens} tokens have {own}, one {first}")
    print(
        f"row-gate: the code of {len(products)} products was compared at {len(_TOKENS)} numbers of "
        f"tokens; {num_problems} problems"
    )
    return 1 if num_problems else 0


def operations(ptx: Sequence[str]) -> tuple[tuple[str, ...], Counter[str]]:
    """Return the matrix instructions of PTX in order, and the counts of other float ones."""
    text = "\n".join(ptx)
    matrix = re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)[\w.:]*", text)
    others = re.findall(
        r"^\s+(?:@!?%p\d+ )?((?:add|sub|mul|fma|div|ex2|rcp)\.[\w.]*f32)", text, re.M
    )
    return tuple(matrix), Counter(others)


def _operations(
    mesh: Mesh, product: Configuration | GroupedShape
) -> tuple[tuple[str, ...], Counter[str]]:
    before = set(Path(_DUMP.name).glob("*.ptx"))
    function, arguments = product.call()
    place = NamedSharding(mesh, PartitionSpec())
    arguments: dict[str, Any] = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
    )
    with jax.set_mesh(mesh):
        jax.jit(function).lower(**arguments).compile()
    made = sorted(set(Path(_DUMP.name).glob("*.ptx")) - before)
    return operations([path.read_text() for path in made])


if __name__ == "__main__":
    sys.exit(main())
