"""Packs the rows of a plan into the arrays of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.kernels import Rows
from jaxserve.kernels.paged_attention import Plan
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.models.batch import AttentionBatch, IncomingPages, KVCache
from jaxserve.models.decoder import Tap
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.processors import AllowedTokens
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.slots import SlotState

Params = Any


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWindow:
    """The slots that a decode loop runs over, and how often."""

    start: Int32[Array, ""]
    # An upper bound; the loop ends earlier when all slots have ended.
    num_iterations: Int32[Array, ""]
    # Upper bound of new tokens of each slot from `start` on; 0 leaves the slot unchanged.
    most: Int32[Array, " rows"]
    verify_cost: Float32[Array, ""]  # see `StepPlan`


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedBatch:
    """Rows of a mixed step; unused rows have length 0."""

    token_row: Int32[Array, " tokens"]  # row of each token; the number of slots for padding
    slot: Int32[Array, " slots"]
    start: Int32[Array, " slots"]  # an upper bound, see `where_slots_are`
    query_start: Int32[Array, " slots"]
    query_length: Int32[Array, " slots"]
    samples: Bool[Array, " slots"]  # rows that end at their slot's newest token


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChoosingRows:
    """Slots that choose tokens in a mixed step, some of them after several of its rows."""

    slot: Int32[Array, " rows"]  # the number of slots for padding
    # The row after which the slot's first token is chosen; its other rows follow it.
    first: Int32[Array, " rows"]
    num_proposed: Int32[Array, " rows"]  # the slot's newest tokens, if they are proposals


def where_slots_are(
    batch: MixedBatch, slots: SlotState
) -> tuple[MixedBatch, Bool[Array, " slots"]]:
    """Return the rows at their slots' real positions, and which of them are live.

    A plan is an upper bound. If a slot has fewer tokens than planned, a row that samples ends at
    its newest token, and a row that does not sample is inert.
    """
    length = slots.length[batch.slot]
    ends = jnp.where(batch.samples, length, batch.start + batch.query_length)
    start = jnp.maximum(ends - batch.query_length, 0)
    return replace(batch, start=start), ~slots.done[batch.slot] & (ends <= length)


def positions_and_slots(
    batch: MixedBatch,
) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """Return position and slot of every token; padding has those of row 0's start."""
    is_padding = batch.token_row >= batch.slot.shape[0]
    row = jnp.where(is_padding, 0, batch.token_row)
    offset = jnp.arange(batch.token_row.shape[0]) - batch.query_start[row]
    return batch.start[row] + jnp.where(is_padding, 0, offset), batch.slot[row]


def token_pages(
    config: EngineConfig,
    page_table: Int32[Array, "rows row_pages"],
    row: Int32[Array, " tokens"],
    positions: Int32[Array, " tokens"],
) -> Int32[Array, " tokens *tables"]:
    """Return the page that each token's keys and values go to, in each page table."""
    index, num_tables = positions // config.page_size, config.page_layout.num_tables
    if num_tables == 1:
        return page_table[row, index]
    return page_table[row[:, None], index[:, None] * num_tables + jnp.arange(num_tables)]


def attention_batch(
    config: EngineConfig,
    *,
    positions: Int32[Array, " tokens"],
    pages: Int32[Array, " tokens *tables"],  # those of `token_pages`
    valid: Bool[Array, " tokens"],
    rows: Rows,
    plan: Plan | None,  # the plan of a kernel that needs one; None otherwise
    max_query_length: int | None = None,
    cross_rows: Rows | None = None,
    slot: Int32[Array, " rows"] | None = None,
    adapter: Int32[Array, " tokens"] | None = None,
    is_proposed: bool = False,
) -> AttentionBatch:
    """Return the attention batch of the tokens; invalid ones write to the null page.

    Args:
      max_query_length: the largest of all rows; None if it is not known before the step.
      cross_rows: the rows of cross attention; None for a model without an encoder.
      slot: the slot of each row, for models with states in slots.
      is_proposed: see `AttentionBatch`.
    """
    return AttentionBatch(
        positions=positions,
        page=jnp.where(valid if pages.ndim == 1 else valid[:, None], pages, NULL_PAGE),
        offset=positions % config.page_size,
        rows=rows,
        plan=plan,
        max_query_length=max_query_length,
        implementation=config.attention,
        cross_rows=cross_rows,
        slot=slot if config.has_slot_state else None,
        adapter=adapter,
        valid=valid,
        is_proposed=is_proposed,
        places=config.page_layout.places,
    )


def tap(probe: Probe | None, rows: Int32[Array, " rows"]) -> Tap | None:
    """Return where the probe reads activations: at the tokens `rows`."""
    return None if probe is None else Tap(probe.layer, rows)


def tapped(
    model: Any,
    inputs: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
    attention: AttentionBatch,
    cache: KVCache,
    where: Tap | None,
    incoming: IncomingPages | None = None,
) -> tuple[Float[Array, "tokens hidden"], KVCache, Float32[Array, "rows embed"] | None]:
    """Call `Decoder.tapped`; the activations that the probe reads are converted to float32."""
    hidden, cache, read = model.tapped(inputs, attention, cache, where, incoming)
    return hidden, cache, None if read is None else read.astype(jnp.float32)


def sampling_first(rows: Sequence[Row]) -> list[int]:
    """Return the indices of the rows, sampling rows first."""
    return sorted(range(len(rows)), key=lambda i: not rows[i].samples)


def body_size(
    config: EngineConfig,
    rows: Sequence[Row],
    *,
    is_coarse: bool = False,
    is_made: Callable[[int], bool] | None = None,
) -> int:
    """Return the smallest compiled size of a mixed step that holds these rows, in tokens.

    While sizes are still being compiled, only the existing ones count, so that no step waits for a
    size that it can do without.

    Args:
      is_coarse: only `coarse_token_buckets` count, as they do if a row scores its prompt, or pools
        all of it.
      is_made: whether the executable for a size exists; None if all do, or none are being made.
    """
    is_coarse = is_coarse or any(
        row.wants_prompt_logprobs or (row.num_pooled and config.pooling == "mean") for row in rows
    )
    sizes = config.coarse_token_buckets if is_coarse else config.token_buckets
    smallest = bucket(max(1, sum(row.num_tokens for row in rows)), sizes)
    if is_made is None:
        return smallest
    return next((size for size in sizes if size >= smallest and is_made(size)), smallest)


def pack_rows(
    config: EngineConfig, rows: Sequence[Row], num_tokens: int | None = None
) -> tuple[MixedBatch, list[int]]:
    """Return the batch of these rows (NumPy arrays), and where in it each row's tokens begin.

    Its size is `num_tokens`; by default the smallest compiled one that holds the rows.
    """
    num_slots = config.max_slots
    num_tokens = num_tokens or body_size(config, rows)
    token_row = np.full(num_tokens, num_slots, np.int32)
    slot, start, query_start, length = np.zeros((4, num_slots), np.int32)
    samples = np.zeros(num_slots, np.bool_)
    used = 0
    starts = []
    for i, row in enumerate(rows):
        token_row[used : used + row.num_tokens] = i
        slot[i], start[i], query_start[i], length[i] = row.slot, row.start, used, row.num_tokens
        samples[i] = row.samples
        starts.append(used)
        used += row.num_tokens
    # NumPy arrays, which jit turns into device arrays.
    batch: Any = MixedBatch(token_row, slot, start, query_start, length, samples)  # pyrefly: ignore[bad-argument-type]
    return batch, starts


def in_places(row: Row) -> list[Row]:
    """Return a row with proposals as one row for each token that the step chooses, else the row.

    None of them samples for itself: `heads.verifying_head` chooses their tokens one by one.
    """
    num = len(row.proposed)
    if not num:
        return [row]
    known = replace(row, num_tokens=row.num_tokens - num, max_new_tokens=0, proposed=())
    end = known.start + known.num_tokens
    return [known, *(replace(known, start=end + i, num_tokens=1) for i in range(num))]


def pack_choosing(config: EngineConfig, rows: Sequence[Row], num_rows: int) -> ChoosingRows:
    """Return which slots choose tokens after which rows of a mixed step (NumPy arrays).

    `rows` are those that sample, in the batch's order, in which `in_places` divides them.
    """
    slot = np.full(num_rows, config.max_slots, np.int32)
    first, num = np.zeros((2, num_rows), np.int32)
    used = 0
    for i, row in enumerate(rows):
        slot[i], first[i], num[i] = row.slot, used, len(row.proposed)
        used += 1 + len(row.proposed)
    arrays: Any = slot, first, num  # NumPy arrays, as in `pack_rows`
    return ChoosingRows(*arrays)


def head_sizes(
    config: EngineConfig, variant: Variant, *, has_masks: bool = False
) -> tuple[int, ...]:
    """Return the numbers of rows that a mixed step's head is compiled for."""
    sizes = variant.sizes(config.head_buckets)
    if not has_masks or variant is Variant.FULL:
        return sizes
    more = (size for size in config.masked_head_buckets if size < config.max_slots)
    return tuple(sorted({*sizes, *more}))


def sampling_slots(
    config: EngineConfig, rows: Sequence[Row], variant: Variant, *, has_masks: bool = False
) -> Int32[np.ndarray, " rows"]:
    """Return the slots of the rows that sample, padded with `max_slots` to a size of the head.

    Rows that sample come first, in this order.
    """
    slots = [row.slot for row in rows if row.samples]
    size = bucket(len(slots), head_sizes(config, variant, has_masks=has_masks))
    index = np.full(size, config.max_slots, np.int32)
    index[: len(slots)] = slots
    return index


def pack_masks(
    plan: StepPlan, order: Sequence[int], num_rows: int
) -> dict[str, dict[str, np.ndarray]] | None:
    """Return the masks of a head's rows, padding included, as `step_arrays`; None without any.

    Waits until the masks are computed. `order` is the index in the plan of each row of the head,
    repeated for a row with proposals.
    """
    if plan.masks is None:
        return None
    places: dict[int, deque[int]] = {row: deque() for row in order}
    for i, row in enumerate(order):
        places[row].append(i)
    own = [(places[row].popleft(), i) for i, row in enumerate(plan.masks.rows) if places.get(row)]
    if not own:
        return None
    words = plan.masks.words()
    masks = np.full((num_rows, words.shape[1]), 2**32 - 1, np.uint32)
    targets, sources = zip(*own, strict=True)
    masks[list(targets)] = words[list(sources)]
    return {AllowedTokens.name: {"words": masks}}


def no_masks(num_rows: int, vocab_size: int) -> dict[str, dict[str, np.ndarray]]:
    """Return `step_arrays` that allow every token, to compile a head that takes masks."""
    words = AllowedTokens.step_arrays["words"]
    return {AllowedTokens.name: {"words": words.full(num_rows, vocab_size)}}


def loop_sizes(
    config: EngineConfig, variant: Variant, *, speculates: bool = False
) -> tuple[int, ...]:
    """Return the numbers of slots of decode loops; see `EngineConfig.speculating_buckets`."""
    return config.speculating_buckets if speculates else variant.sizes(config.slot_buckets)


def decode_window(config: EngineConfig, plan: StepPlan, variant: Variant) -> tuple[range, int]:
    """Return the slots that a decode loop runs over, and how many tokens it proposes.

    The slots are the plan's, rounded up to a compiled size. A loop of a size without a speculating
    variant proposes no tokens.
    """
    sizes = loop_sizes(config, variant, speculates=plan.num_proposed > 0)
    speculates = plan.num_proposed > 0 and bool(sizes) and plan.window_size <= sizes[-1]
    size = bucket(plan.window_size, loop_sizes(config, variant, speculates=speculates))
    start = min(plan.window_start, config.max_slots - size)
    num_proposed = config.num_proposed_beside(size) if speculates else 0
    return range(start, start + size), num_proposed


def pack_window(
    window: range, rows: Iterable[Row], num_iterations: int = 1, verify_cost: float = 1.0
) -> DecodeWindow:
    """Return the window of a decode loop; each slot gets its row's tokens at most, or none."""
    most: Any = np.zeros(len(window), np.int32)  # NumPy arrays, as in `pack_rows`
    for row in rows:
        most[row.slot - window.start] = row.max_new_tokens
    start: Any = np.int32(window.start)
    number: Any = np.int32(num_iterations)
    cost: Any = np.asarray(verify_cost, np.float32)
    return DecodeWindow(start, number, most, cost)
