"""Time and error of paged attention on a device, at one shape with random inputs.

Each call reads another layer of the cache, and takes its queries from the previous call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.roofline import kv_token_bytes
from benchmarks.common.timing import seconds
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import Rows, paged_attention, quantize
from jaxserve.kernels.fused_matmul import shapes as fused_shapes
from jaxserve.kernels.gated_cell import shapes as cell_shapes
from jaxserve.kernels.grouped_matmul import shapes as grouped_shapes
from jaxserve.kernels.kv_write import shapes as write_shapes
from jaxserve.kernels.page_copy import shapes as copy_shapes
from jaxserve.kernels.paged_attention import Plan, Tiling, planned_tiling
from jaxserve.kernels.paged_attention.shapes import (
    BENCHMARK_SHAPES,
    GPU_DECODE_SHAPES,
    GPU_MIXED_SHAPES,
    GPU_PREFILL_SHAPES,
    AttentionShape,
)
from jaxserve.kernels.quantised_matmul import shapes as product_shapes

SHAPES = {
    "decode": GPU_DECODE_SHAPES,
    "prefill": GPU_PREFILL_SHAPES,
    "mixed": GPU_MIXED_SHAPES,
    "small": BENCHMARK_SHAPES,
}
OTHERS = {
    "write": write_shapes.CONFIGURATIONS,
    "copy": copy_shapes.CONFIGURATIONS,
    "cell": cell_shapes.CONFIGURATIONS,
    "fused": fused_shapes.CONFIGURATIONS,
    "small_moves": (
        *write_shapes.SMALL_CONFIGURATIONS,
        *copy_shapes.SMALL_CONFIGURATIONS,
        *cell_shapes.SMALL_CONFIGURATIONS,
    ),
    "product": product_shapes.CONFIGURATIONS,
    "small_products": product_shapes.SMALL_CONFIGURATIONS,
    "grouped": grouped_shapes.BENCHMARK_SHAPES,
    "small_groups": grouped_shapes.TEST_SHAPES[:1],
}


def chosen(kinds: str, left_out: str = "") -> tuple[list[AttentionShape], list[Any]]:
    """Return shapes of attention, each once, and moves and products.

    Args:
      kinds: kinds or names of shapes, separated by commas.
      left_out: shapes to leave out, likewise.
    """
    named = {shape.name: (shape,) for shapes in SHAPES.values() for shape in shapes}
    known = {**SHAPES, **named}

    def members(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = sorted(set(names) - {*known, *OTHERS})
        if unknown:
            raise InvalidConfigError(
                f"unknown shapes {unknown}; give some of {(*SHAPES, *OTHERS)}, or names of shapes"
            )
        return names

    excluded = {shape.name for name in members(left_out) for shape in known.get(name, ())}
    shapes = {
        shape.name: shape
        for name in members(kinds)
        for shape in known.get(name, ())
        if shape.name not in excluded
    }
    return list(shapes.values()), [each for name in members(kinds) for each in OTHERS.get(name, ())]


# Bytes of all layers together, so that no call finds its pages in a cache of the device.
CACHE_BYTES = 512 << 20
MAX_LAYERS = 16
CALLS = 20
_CHAINS = 4
_ROWS_COMPARED = 4


def kv_bytes(shape: AttentionShape, dtype: jax.typing.DTypeLike) -> int:
    """Return the bytes of keys and values that a call reads, scales included."""
    token_bytes = kv_token_bytes(shape.num_kv_heads, shape.head_dim, dtype)
    return sum(context for _, context in shape.rows) * token_bytes


def num_layers(shape: AttentionShape, dtype: jax.typing.DTypeLike) -> int:
    """Return how many layers make every call find its pages cold."""
    return max(1, min(MAX_LAYERS, -(-CACHE_BYTES // kv_bytes(shape, dtype))))


def scattered(contexts: np.ndarray, page_size: int, *, first: int = 0) -> tuple[np.ndarray, int]:
    """Return a table of random pages from `first` on, no two rows' the same, and their number.

    The table is int32 [rows, pages], 0 past a row's end.
    """
    needed = -(-contexts // page_size)
    pages = np.random.default_rng(0).permutation(int(needed.sum())) + first
    table = np.zeros((len(contexts), int(needed.max())), np.int32)
    table[np.arange(table.shape[1]) < needed[:, None]] = pages
    return table, len(pages)


@final
@dataclass(frozen=True)
class Attention:
    """A call of `paged_attention` at a shape, on random inputs.

    Attributes:
      pages: `k_pages` and `v_pages`, and their scales, if any.
      implementation: by name; None for the platform's choice.
      tiling: of the plan; None for an implementation without one.
    """

    shape: AttentionShape
    q: jax.Array
    pages: dict[str, jax.Array]
    rows: Rows
    implementation: str | None = None
    tiling: Tiling | None = None

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        dtype: jnp.dtype,
        page_dtype: jnp.dtype,
        layers: int,
        implementation: str | None = None,
    ) -> Attention:
        """Return random queries, pages and rows, made on the device; no two rows share a page."""
        lengths, contexts = np.asarray(shape.rows, np.int32).T
        table, num_pages = scattered(contexts, shape.page_size, first=1)
        rows = Rows(
            query_start=jnp.asarray(np.cumsum(lengths) - lengths, jnp.int32),
            query_length=jnp.asarray(lengths),
            first_position=jnp.asarray(contexts - lengths),
            context_length=jnp.asarray(contexts),
            page_table=jnp.asarray(table),
        )
        cache = (layers, 1 + num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = jax.random.split(jax.random.key(0), 3)
        q = normal(keys[0], (int(lengths.sum()), shape.num_heads, shape.head_dim), dtype)
        pages: dict[str, jax.Array] = {}
        for name, key in zip("kv", keys[1:], strict=True):
            pages[f"{name}_pages"] = normal(key, cache, dtype)
            if page_dtype != dtype:
                made = jax.jit(partial(quantize, dtype=page_dtype))(pages[f"{name}_pages"])
                pages[f"{name}_pages"], pages[f"{name}_scales"] = made
        tiling = planned_tiling(
            jax.devices()[0],
            implementation,
            dtype=dtype.name,
            page_dtype=page_dtype.name,
            kv_heads=shape.num_kv_heads,
            group=shape.num_heads // shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        return cls(shape, q, pages, rows, implementation, tiling)

    def _attend(self, rows: Rows) -> Callable[..., jax.Array]:
        most = 1 if self.shape.is_decode else None
        return partial(paged_attention, rows=rows, max_query_length=most)

    def _plan(self, rows: Rows) -> Plan | None:
        if self.tiling is None:
            return None
        return rows.plan(
            self.tiling,
            num_tokens=sum(queries for queries, _ in self.shape.rows),
            max_context=rows.page_table.shape[1] * self.shape.page_size,
            is_decode=self.shape.is_decode,
        )

    def seconds(self) -> float:
        """Return the seconds of one call."""
        attend, work = self._attend(self.rows), self._plan(self.rows)

        def one(q: jax.Array, layer: int, pages: Any) -> jax.Array:
            return attend(q, layer=layer, plan=work, implementation=self.implementation, **pages)

        return time_chain(one, self.q, self.pages, len(self.pages["k_pages"]))

    def error(self) -> float:
        """Return the relative norm of the difference from XLA in float32, without TF32.

        The first `_ROWS_COMPARED` rows and the last row are compared.
        """
        shape, q = self.shape, self.q
        index = np.unique([*range(min(_ROWS_COMPARED, len(shape.rows))), len(shape.rows) - 1])
        some = jax.tree.map(lambda x: x[index], self.rows)
        starts, lengths = np.asarray(some.query_start), np.asarray(some.query_length)
        owned = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
        if shape.is_decode:
            owned = np.arange(len(index))
            q, some = q[index], replace(some, query_start=jnp.asarray(owned))
        attend = partial(self._attend(some), layer=0)
        own = partial(attend, plan=self._plan(some), implementation=self.implementation)
        got = jax.jit(own)(q, **self.pages)
        # The default on GPUs is TF32, whose error is as large as the one that is measured.
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(partial(attend, implementation="xla"))
            wanted = exact(q.astype(jnp.float32), **self.pages)
        return relative_error(np.asarray(got)[owned], np.asarray(wanted)[owned])


def relative_error(got: Any, wanted: Any) -> float:
    """Return the norm of the difference over that of the wanted values, in float32."""
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def time_chain(
    attend: Callable[[jax.Array, int, Any], jax.Array], q: jax.Array, given: Any, layers: int
) -> float:
    """Return the seconds of one call, in a chain over the layers in turn.

    Each call takes the output of the previous call as its queries.

    Args:
      attend: takes queries, a layer, and `given`.
    """

    def chain(q: jax.Array, given: Any) -> jax.Array:
        for i in range(CALLS):
            q = attend(q, i % layers, given)
        return q

    chains = _CHAINS if jax.default_backend() == "gpu" else 1
    return seconds(jax.jit(chain), q, given, calls=chains) / CALLS
