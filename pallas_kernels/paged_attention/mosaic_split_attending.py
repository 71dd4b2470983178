"""The attending warpgroup of the split kernel; see `mosaic_split`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.paged_attention.mosaic_memory import rows_of
from pallas_kernels.paged_attention.mosaic_split_memory import SplitItem, SplitMemory, SplitSizes

_MASKED = -1e30
# JAX 0.10, on which these kernels do not run, has another signature.
_load: Any = mosaic.load
_LOG2_E = math.log2(math.e)

# Values [head_dim, columns], maximum [columns] and sum [columns] of an unfinished softmax. Maxima
# are rounded to whole numbers, so that parts are scaled by powers of two, as in `triton_kernels`.
Softmax = tuple[jax.Array, jax.Array, jax.Array]


@final
@dataclass(frozen=True)
class Attending:
    """The warpgroup that attends."""

    kernel: SplitSizes
    memory: SplitMemory

    def run(self) -> None:
        self.kernel.for_each_item(self.memory, self._attend)
        mosaic.wait_smem_to_gmem(0)

    def _attend(self, number: jax.Array, item: SplitItem, blocks: jax.Array) -> jax.Array:
        kernel, memory = self.kernel, self.memory
        del number
        mosaic.barrier_wait(memory.q_is_full)
        turned = memory.tiled_q.transpose((1, 0))
        turned[...] = _load(
            memory.arriving_q.transpose((1, 0)), layout=mosaic.Layout.WGMMA, optimized=False
        )
        mosaic.commit_smem()
        mosaic.barrier_arrive(memory.q_is_free)

        first, end = kernel.blocks(item.begin, item.end)
        by_column = mosaic.Layout.WGMMA.reduce(0)
        position = item.position + lax.div(
            mosaic.broadcasted_iota(jnp.int32, (kernel.columns,), 0, layout=by_column),
            kernel.group,
        )
        one_block = partial(self._one_block, before=blocks - first, item=item, position=position)
        per_split = kernel.split_keys // kernel.block_keys

        def one_split(split: jax.Array, softmax: Softmax) -> Softmax:
            begin = lax.clamp(first, split * per_split, end)
            stop = lax.clamp(first, (split + 1) * per_split, end)
            values, maximum, totals = lax.fori_loop(
                begin, stop, one_block, self._nothing(by_key=True)
            )
            new = values, maximum, jnp.sum(totals, axis=0)
            pl.when(item.partial >= 0)(
                lambda: self._store_partial(item, item.partial + split - item.first_split, new)
            )
            return _merged(softmax, new)

        values, _, total = lax.fori_loop(
            item.first_split, item.end_split, one_split, self._nothing(by_key=False)
        )
        pl.when(item.partial < 0)(lambda: self._store(item, values, total))
        return blocks + (end - first)

    def _nothing(self, *, by_key: bool) -> Softmax:
        """Return a softmax without keys; its sum is [block_keys, columns] if `by_key`."""
        kernel, layout = self.kernel, mosaic.Layout.WGMMA
        by_column = layout.reduce(0)
        columns = (kernel.columns,)
        rows = (kernel.block_keys, *columns) if by_key else columns
        total = mosaic.layout_cast(jnp.zeros(rows, jnp.float32), layout if by_key else by_column)
        return (
            mosaic.layout_cast(jnp.zeros((kernel.head_dim, *columns), jnp.float32), layout),
            mosaic.layout_cast(jnp.full(columns, _MASKED, jnp.float32), by_column),
            total,
        )

    def _one_block(
        self,
        block: jax.Array,
        softmax: Softmax,  # its sum [block_keys, columns]
        *,
        before: jax.Array,
        item: SplitItem,
        position: jax.Array,  # int32 [columns]
    ) -> Softmax:
        kernel, memory = self.kernel, self.memory
        stage = lax.rem(before + block, kernel.num_stages)
        values, maximum, total = softmax
        mosaic.barrier_wait(memory.k_is_full.at[stage])
        logits = self._product(
            memory.k_blocks.at[stage], memory.tiled_q.transpose((1, 0)), kernel.block_keys
        )
        mosaic.barrier_arrive(memory.k_is_free.at[stage])
        logits = self._masked(self._capped(logits), item, block * kernel.block_keys, position)
        new = lax.max(maximum, jnp.max(logits, axis=0))
        new = lax.round(new, lax.RoundingMethod.TO_NEAREST_EVEN)
        kept = jnp.exp2(maximum - new)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new, logits.shape, [1]))
        total = total * lax.broadcast_in_dim(kept, total.shape, [1]) + weights
        # The product that read the weights before has ended.
        memory.weights.transpose((1, 0))[...] = weights.astype(kernel.dtype)
        mosaic.barrier_wait(memory.v_is_full.at[stage])
        self._mend(item, block, stage)
        mosaic.commit_smem()
        product = self._product(
            memory.v_blocks.at[stage].transpose((1, 0)),
            memory.weights.transpose((1, 0)),
            kernel.head_dim,
        )
        mosaic.barrier_arrive(memory.v_is_free.at[stage])
        values = values * lax.broadcast_in_dim(kept, values.shape, [1]) + product
        return values, new, total

    def _product(self, left: Any, right: Any, rows: int) -> jax.Array:
        """Return the float32 product of two references to shared memory, `rows` high."""

        def product(accumulator: Any) -> jax.Array:
            mosaic.wgmma(accumulator, left, right)
            return accumulator[...]

        return pl.run_scoped(product, mosaic.WGMMAAccumulatorRef((rows, self.kernel.columns)))

    def _capped(self, products: jax.Array) -> jax.Array:
        """Return the logits to base 2."""
        kernel = self.kernel
        if kernel.soft_cap is None:
            return products * (kernel.scale * _LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the approximate tanh has eleven bits.
        powers = jnp.exp2(products * (2 * kernel.scale / kernel.soft_cap * _LOG2_E))
        root = lax.rsqrt(powers + 1.0)
        return (1.0 - 2.0 * root * root) * (kernel.soft_cap * _LOG2_E)

    def _masked(
        self, logits: jax.Array, item: SplitItem, first: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits with minus infinity for unseen keys.

        Args:
          first: position of the block's first key.
          position: int32 [columns], of the queries.
        """
        kernel, shape = self.kernel, logits.shape
        key = mosaic.broadcasted_iota(jnp.int32, shape, 0, layout=mosaic.Layout.WGMMA)
        last = lax.min(position, jnp.broadcast_to(item.end - 1, position.shape)) - first
        seen = key <= lax.broadcast_in_dim(last, shape, [1])
        if kernel.sliding_window is not None:
            hidden = position - (kernel.sliding_window + first)
            seen = seen & (key > lax.broadcast_in_dim(hidden, shape, [1]))
        return jnp.where(seen, logits, -jnp.inf)

    def _mend(self, item: SplitItem, block: jax.Array, stage: jax.Array) -> None:
        """Zero the values past the context, which may be NaN."""
        kernel, memory = self.kernel, self.memory
        begin = block * kernel.block_keys

        @pl.when(begin + kernel.block_keys > item.context)
        def _() -> None:
            place = memory.v_blocks.at[stage]
            values = _load(place, layout=mosaic.Layout.WGMMA)
            key = mosaic.broadcasted_iota(jnp.int32, values.shape, 0, layout=mosaic.Layout.WGMMA)
            place[...] = jnp.where(key < item.context - begin, values, jnp.zeros_like(values))

    def _store_partial(self, item: SplitItem, index: jax.Array, softmax: Softmax) -> None:
        memory = self.memory
        values, maximum, total = softmax
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        memory.leaving_values[...] = values
        memory.leaving_sums[0] = maximum
        memory.leaving_sums[1] = total
        mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(memory.leaving_values, memory.values.at[index, item.kv_head])
        mosaic.copy_smem_to_gmem(memory.leaving_sums, memory.sums.at[index, item.kv_head])

    def _store(self, item: SplitItem, values: jax.Array, total: jax.Array) -> None:
        """Write the output; zeros for queries that see no key."""
        kernel, memory = self.kernel, self.memory
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        out = values * lax.broadcast_in_dim(inverse, values.shape, [1])
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        memory.leaving.transpose((1, 0))[...] = out.astype(kernel.dtype)
        mosaic.commit_smem()
        heads = pl.ds(item.kv_head * kernel.group, kernel.group)
        for query in range(kernel.queries):

            @pl.when(query < item.count)
            def store(query: int = query) -> None:
                mosaic.copy_smem_to_gmem(
                    memory.leaving.at[rows_of(query, kernel.group)],
                    memory.out.at[item.token + query, heads],
                )


def _merged(one: Softmax, other: Softmax) -> Softmax:
    """Merge two parts of a softmax; the result is exactly `one` if `other` has no keys."""
    maximum = lax.max(one[1], other[1])
    keep, add = jnp.exp2(one[1] - maximum), jnp.exp2(other[1] - maximum)
    shape = one[0].shape
    return (
        one[0] * lax.broadcast_in_dim(keep, shape, [1])
        + other[0] * lax.broadcast_in_dim(add, shape, [1]),
        maximum,
        one[2] * keep + other[2] * add,
    )
