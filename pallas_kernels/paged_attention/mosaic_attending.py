"""The attending warpgroups of the tile kernel; see `mosaic_tile`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.paged_attention.mosaic_memory import (
    ATTENDING,
    ROWS,
    Item,
    Memory,
    ceil_div,
    rows_of,
)

_MASKED = -1e30
# JAX 0.10, on which these kernels do not run, has another signature.
_load: Any = mosaic.load
_LOG2_E = math.log2(math.e)

# Values [rows, head_dim], maximum [rows] and sum [rows] of an unfinished softmax.
Softmax = tuple[jax.Array, jax.Array, jax.Array]


class Tile(Protocol):
    """What a warpgroup reads of the kernel that it belongs to: a `mosaic_tile.TileKernel`."""

    @property
    def scale(self) -> float: ...

    @property
    def sliding_window(self) -> int | None: ...

    @property
    def soft_cap(self) -> float | None: ...

    @property
    def group(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def block_keys(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def interpret(self) -> bool: ...

    @property
    def queries(self) -> int: ...

    def blocks(self, item: Item, /) -> tuple[jax.Array, jax.Array]: ...

    def for_each_item(
        self, memory: Memory, body: Callable[[jax.Array, Item, jax.Array], jax.Array], /
    ) -> tuple[jax.Array, jax.Array]: ...


@final
@dataclass(frozen=True)
class Attending:
    """A warpgroup that computes attention for its half of each tile's queries."""

    kernel: Tile
    memory: Memory
    warpgroup: Any

    def run(self) -> None:
        self.kernel.for_each_item(self.memory, self._attend)
        mosaic.wait_smem_to_gmem(0)

    def _attend(self, number: jax.Array, item: Item, blocks: jax.Array) -> jax.Array:
        kernel, memory, mine = self.kernel, self.memory, self.warpgroup
        del number
        mosaic.barrier_wait(memory.q_is_full.at[mine])
        layout = mosaic.Layout.WGMMA
        memory.tiled_q[mine] = _load(memory.arriving_q.at[mine], layout=layout, optimized=False)
        mosaic.commit_smem()
        mosaic.barrier_arrive(memory.q_is_free)

        first, end = kernel.blocks(item)
        # From whole_begin to whole_end, every query sees every key of a block.
        whole_end = lax.div(lax.min(item.position + 1, item.end), kernel.block_keys)
        whole_begin = first
        if kernel.sliding_window is not None:
            hidden = lax.max(item.position + item.count - kernel.sliding_window, 0)
            whole_begin = lax.clamp(first, ceil_div(hidden, kernel.block_keys), end)
        whole_end = lax.clamp(whole_begin, whole_end, end)

        by_row = layout.reduce(1)
        softmax = (
            mosaic.layout_cast(jnp.zeros((ROWS, kernel.head_dim), jnp.float32), layout),
            mosaic.layout_cast(jnp.full((ROWS,), _MASKED, jnp.float32), by_row),
            mosaic.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
        )
        query = lax.rem(
            mosaic.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row), kernel.queries
        )
        position = query + (item.position + mine * kernel.queries)
        before = blocks - first
        whole = partial(self._whole_block, before=before)
        edge = partial(self._edge_block, before=before, item=item, position=position)
        if kernel.sliding_window is not None:
            softmax = lax.fori_loop(first, whole_begin, edge, softmax)
        # The second warpgroup runs half a block behind the first.
        pl.when(mine == 1)(self._take_turns)
        softmax = lax.fori_loop(whole_begin, whole_end, whole, softmax)
        pl.when(mine == 0)(self._take_turns)
        softmax = lax.fori_loop(whole_end, end, edge, softmax)
        self._store(item, softmax)
        return blocks + (end - first)

    def _take_turns(self) -> None:
        mosaic.barrier_arrive(self.memory.turn)
        mosaic.barrier_wait(self.memory.turn)

    def _whole_block(self, block: jax.Array, softmax: Softmax, *, before: jax.Array) -> Softmax:
        """Attend to a block of keys that all queries see, alternating with the other warpgroup."""
        memory = self.memory
        stage = lax.rem(before + block, self.kernel.num_stages)
        mosaic.barrier_wait(memory.k_is_full.at[stage])
        logits = self._product(memory.k_blocks.at[stage], self._take_turns)
        mosaic.barrier_arrive(memory.k_is_free.at[stage])
        softmax, weights = self._weigh(*self._capped(logits), softmax)
        mosaic.barrier_arrive(memory.turn)
        mosaic.barrier_wait(memory.v_is_full.at[stage])
        mosaic.barrier_wait(memory.turn)
        softmax = self._add_product(softmax, weights, memory.v_blocks.at[stage])
        mosaic.barrier_arrive(memory.v_is_free.at[stage])
        return softmax

    def _edge_block(
        self,
        block: jax.Array,
        softmax: Softmax,
        *,
        before: jax.Array,
        item: Item,
        position: jax.Array,  # int32 [ROWS]
    ) -> Softmax:
        """Attend to a block with keys that some queries do not see."""
        memory = self.memory
        stage = lax.rem(before + block, self.kernel.num_stages)
        mosaic.barrier_wait(memory.k_is_full.at[stage])
        logits, scale = self._capped(self._product(memory.k_blocks.at[stage]))
        mosaic.barrier_arrive(memory.k_is_free.at[stage])
        logits = self._masked(logits, item, block * self.kernel.block_keys, position)
        softmax, weights = self._weigh(logits, scale, softmax)
        mosaic.barrier_wait(memory.v_is_full.at[stage])
        self._mend(item, block, stage)
        softmax = self._add_product(softmax, weights, memory.v_blocks.at[stage])
        mosaic.barrier_arrive(memory.v_is_free.at[stage])
        return softmax

    def _product(self, keys: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
        """Return queries times keys; `meanwhile` is called while the product runs."""

        def product(accumulator: Any) -> jax.Array:
            queries = self.memory.tiled_q.at[self.warpgroup]
            mosaic.wgmma(accumulator, queries, keys.transpose((1, 0)))
            meanwhile()
            return accumulator[...]

        return pl.run_scoped(product, mosaic.WGMMAAccumulatorRef((ROWS, keys.shape[0])))

    def _weigh(
        self, logits: jax.Array, scale: float, softmax: Softmax
    ) -> tuple[Softmax, jax.Array]:
        """Return the softmax rescaled and with the weights' sum added, and the weights."""
        values, maximum, total = softmax
        new = lax.max(maximum, jnp.max(logits, axis=1) * scale)
        kept = jnp.exp2(maximum - new)
        weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new, logits.shape, [0]))
        values = values * lax.broadcast_in_dim(kept, values.shape, [0])
        total = total * kept + jnp.sum(weights, axis=1)
        rounded = weights.astype(self.kernel.dtype)
        values, new, total, rounded = lax.optimization_barrier((values, new, total, rounded))
        return (values, new, total), rounded

    def _capped(self, products: jax.Array) -> tuple[jax.Array, float]:
        """Return x and a factor such that x * factor are the logits in base 2."""
        kernel = self.kernel
        if kernel.soft_cap is None:
            return products, kernel.scale * _LOG2_E
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the approximate tanh has eleven bits.
        powers = jnp.exp2(products * (2 * kernel.scale / kernel.soft_cap * _LOG2_E))
        root = lax.rsqrt(powers + 1.0)
        return 1.0 - 2.0 * root * root, kernel.soft_cap * _LOG2_E

    def _masked(
        self, logits: jax.Array, item: Item, first: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits with minus infinity for unseen keys.

        Args:
          first: position of the block's first key.
          position: int32 [ROWS], of the queries.
        """
        kernel, shape = self.kernel, logits.shape
        key = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.Layout.WGMMA)
        last = lax.min(position, jnp.broadcast_to(item.end - 1, position.shape)) - first
        seen = key <= lax.broadcast_in_dim(last, shape, [0])
        if kernel.sliding_window is not None:
            hidden = position - (kernel.sliding_window + first)
            seen = seen & (key > lax.broadcast_in_dim(hidden, shape, [0]))
        return jnp.where(seen, logits, -jnp.inf)

    def _mend(self, item: Item, block: jax.Array, stage: jax.Array) -> None:
        """Zero the values past the context, which may be NaN; each warpgroup writes half."""
        kernel, memory = self.kernel, self.memory
        begin = block * kernel.block_keys
        # A warpgroup reads and writes at least 64 rows; smaller blocks are halved by columns.
        by_rows = kernel.block_keys >= ROWS * ATTENDING
        half = (kernel.block_keys if by_rows else kernel.head_dim) // ATTENDING

        def mend(i: int) -> None:
            mine = rows_of(i, half)
            place = memory.v_blocks.at[(stage, mine) if by_rows else (stage, slice(None), mine)]
            values = _load(place, layout=mosaic.Layout.WGMMA)
            key = mosaic.broadcasted_iota(jnp.int32, values.shape, 0, layout=mosaic.Layout.WGMMA)
            exists = key < item.context - begin - (i * half if by_rows else 0)
            place[...] = jnp.where(exists, values, jnp.zeros_like(values))

        @pl.when(begin + kernel.block_keys > item.context)
        def _() -> None:
            for i in range(ATTENDING):
                pl.when(self.warpgroup == i)(partial(mend, i))
            mosaic.commit_smem()
            mosaic.barrier_arrive(memory.mended)
            mosaic.barrier_wait(memory.mended)

    def _add_product(self, softmax: Softmax, weights: jax.Array, v: Any) -> Softmax:
        """Return the softmax with the weighted values added."""
        values, maximum, total = softmax
        if self.kernel.interpret:
            # The interpreter's wgmma needs both factors in shared memory. This is an ordinary read,
            # so a fence is needed before the next copy to the same memory.
            product = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
            mosaic.commit_smem()
            return values + product, maximum, total

        def add(accumulator: Any) -> None:
            mosaic.wgmma(accumulator, weights, v)

        summed: Any = pl.run_state(add)(mosaic.WGMMAAccumulatorRef.init(values))
        return summed, maximum, total

    def _store(self, item: Item, softmax: Softmax) -> None:
        """Write the output in pieces of powers of two; zeros for queries that see no key."""
        kernel, memory, mine = self.kernel, self.memory, self.warpgroup
        values, _, total = softmax
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        out = values * lax.broadcast_in_dim(inverse, values.shape, [0])
        # Wait until the previous item's output has been read.
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        memory.leaving[mine] = out.astype(kernel.dtype)
        mosaic.commit_smem()
        stored = mine * kernel.queries
        count = lax.clamp(0, item.count - stored, kernel.queries)
        done = jnp.int32(0)
        for size in _powers_of_two(kernel.queries):

            @pl.when((count & size) != 0)
            def store(size: int = size, done: jax.Array = done) -> None:
                tokens = pl.ds(item.token + stored + done, size)
                for member in range(kernel.group):
                    rows = pl.ds(member * kernel.queries + done, size)
                    mosaic.copy_smem_to_gmem(
                        memory.leaving.at[mine, rows],
                        memory.out.at[tokens, item.kv_head * kernel.group + member],
                    )

            done = done + (count & size)


def _powers_of_two(most: int) -> list[int]:
    """Return the powers of two from the largest that is at most `most` down to 1."""
    return [1 << power for power in reversed(range(most.bit_length()))]
