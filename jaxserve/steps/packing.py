"""Packs the rows of a plan into the arrays of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.steps.batches import ChoosingRows, DecodeWindow, MixedBatch
from jaxserve.steps.sampling.processors import AllowedTokens
from jaxserve.steps.sampling.variants import Variant


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
      is_coarse: only `coarse_token_buckets` count, as they do if a row scores its prompt.
      is_made: whether the executable for a size exists; None if all do, or none are being made.
    """
    is_coarse = is_coarse or any(row.wants_prompt_logprobs for row in rows)
    sizes = config.coarse_token_buckets if is_coarse else config.token_buckets
    smallest = bucket(max(1, sum(row.num_tokens for row in rows)), sizes)
    if is_made is None:
        return smallest
    return next((size for size in sizes if size >= smallest and is_made(size)), smallest)


def pack_rows(
    config: EngineConfig,
    rows: Sequence[Row],
    num_tokens: int | None = None,
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
