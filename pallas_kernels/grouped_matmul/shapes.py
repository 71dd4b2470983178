"""Named shapes of products by groups, for tests and the gate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.grouped_matmul.api import Implementation, grouped_matmul


@final
@dataclass(frozen=True, kw_only=True)
class GroupedShape:
    """Tokens [tokens, inputs] in groups, and a weight [matrices, inputs, columns].

    `batch_invariant` says that a row must have the same bits in any batch.
    """

    name: str
    tokens: int
    matrices: int
    inputs: int
    columns: int
    dtype: str = "bfloat16"
    batch_invariant: bool = False
    kernels = frozenset({"grouped_matmul"})
    donated = ()

    def __str__(self) -> str:
        sizes = f"{self.matrices}x{self.inputs}x{self.columns}"
        kind = "rows" if self.batch_invariant else "grouped"
        return f"{kind}-{self.name}-{sizes}-{self.dtype}-{self.tokens}"

    def call(self, *, implementation: Implementation | None = None) -> tuple[Any, dict[str, Any]]:
        """Return a function for `jax.jit`, and its abstract arguments.

        The implementation is by default the kernel for GPUs.
        """
        if implementation is None:
            implementation = "triton_rows" if self.batch_invariant else "triton"
        arguments = jax.eval_shape(lambda: make_inputs(self, np.zeros(self.matrices, np.int32)))
        return partial(grouped_matmul, implementation=implementation), arguments


def make_inputs(shape: GroupedShape, sizes: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Return random arguments with these sizes of groups, int32 [matrices]."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (shape.tokens, shape.inputs))
    weight = jax.random.normal(keys[1], (shape.matrices, shape.inputs, shape.columns))
    return {
        "x": x.astype(shape.dtype),
        "weight": (weight * shape.inputs**-0.5).astype(shape.dtype),
        "sizes": jnp.asarray(sizes, jnp.int32),
    }


def random_sizes(shape: GroupedShape, seed: int) -> np.ndarray:
    """Return skewed sizes of groups, some empty, with a few tokens after the last group."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(shape.matrices + 1, 0.3))
    return rng.multinomial(shape.tokens, shares)[:-1].astype(np.int32)


def _experts(
    name: str, tokens: int, *, matrices: int, embed: int, mlp: int
) -> tuple[GroupedShape, GroupedShape]:
    make = partial(GroupedShape, tokens=tokens, matrices=matrices)
    return (
        make(name=f"{name}_gate_up", inputs=embed, columns=2 * mlp),
        make(name=f"{name}_down", inputs=mlp, columns=embed),
    )


_QWEN3_30B = dict(matrices=128, embed=2048, mlp=768)
_MIXTRAL_8X7B = dict(matrices=8, embed=4096, mlp=14336)


def _both(tokens: int) -> tuple[GroupedShape, ...]:
    """Return the products of tokens, each with its experts."""
    qwen3 = _experts("qwen3_30b", 8 * tokens, **_QWEN3_30B)
    return (*qwen3, *_experts("mixtral", 2 * tokens, **_MIXTRAL_8X7B))


# 64 decoded tokens, 512 tokens of prompts, and one decoded token.
BENCHMARK_SHAPES = (*_both(64), *_both(512), *_both(1))
CONFIGURATIONS = (
    *BENCHMARK_SHAPES,
    *_both(4096),
    # Adapters of rank 16, and sizes that fill no tile.
    GroupedShape(name="adapters", tokens=64, matrices=8, inputs=4096, columns=16),
    GroupedShape(name="adapters", tokens=64, matrices=8, inputs=16, columns=4096),
    GroupedShape(name="uneven", tokens=300, matrices=5, inputs=1000, columns=1416, dtype="float16"),
    GroupedShape(
        name="uneven", tokens=300, matrices=60, inputs=1000, columns=1416, dtype="float32"
    ),
)
# The same at 64 decoded tokens, and sizes that fill no tile, for batch invariance.
INVARIANT_CONFIGURATIONS = tuple(
    replace(shape, batch_invariant=True) for shape in (*_both(64), *CONFIGURATIONS[-2:])
)
# Sizes that fill no tile, and tiles of each height.
TEST_SHAPES = (
    GroupedShape(name="small", tokens=50, matrices=3, inputs=20, columns=33, dtype="float32"),
    GroupedShape(name="uneven", tokens=150, matrices=5, inputs=40, columns=45),
    GroupedShape(name="uneven", tokens=90, matrices=11, inputs=100, columns=70, dtype="float32"),
    GroupedShape(name="few", tokens=3, matrices=6, inputs=64, columns=96, dtype="float16"),
    GroupedShape(name="one", tokens=70, matrices=1, inputs=16, columns=33, dtype="float16"),
    GroupedShape(name="many", tokens=64, matrices=40, inputs=70, columns=130),
    GroupedShape(name="tall", tokens=500, matrices=3, inputs=128, columns=64),
)
