"""Batches of random requests against the memory roofline: decode steps, prefill, traces."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks.common.repeats import Figures
from benchmarks.common.roofline import Machine, bound
from benchmarks.common.timing import full_step_s
from benchmarks.decode import device_trace
from jaxserve import Runtime
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import random_items


def measure_batch(
    rt: Runtime,
    size: int,
    machine: Machine,
    dtype: Any,
    *,
    prompt_tokens: int,
    output_tokens: int,
) -> Figures:
    """Time decode steps of `size` sequences, and the run from the prompts to the last tokens.

    Args:
      size: sequences; the result says so if their keys and values do not fit.
      dtype: of the weights.
      prompt_tokens, output_tokens: of each sequence.

    Raises:
      InvalidConfigError: no iteration had all sequences.
    """
    needed = size * -(-(prompt_tokens + output_tokens) // rt.options.page_size)
    stats = rt.stats()
    if needed >= stats.num_pages:
        page_bytes = stats.pool_bytes / stats.num_pages
        return {
            "batch_size": size,
            "does_not_fit": f"{needed * page_bytes / 1e9:.1f} GB of keys and values, of "
            f"{stats.pool_bytes / 1e9:.1f} GB for them",
        }
    _answer(rt, size, prompt_tokens, output_tokens, seed=0)  # compiles
    before = rt.stats()
    num_before = len(rt.report().steps)
    wall_s = _answer(rt, size, prompt_tokens, output_tokens, seed=1)
    after = rt.stats()
    step_s = full_step_s(rt.report().steps[num_before:], size)
    if step_s is None:
        raise InvalidConfigError(f"no decode step had all {size} sequences; lower --batches")
    roof = bound(
        *(machine, rt.model_config, dtype),
        kv_dtype=rt.options.kv_dtype,
        batch_size=size,
        context=prompt_tokens + output_tokens / 2,
        num_prompt_tokens=size * prompt_tokens,
        num_output_tokens=size * output_tokens,
    )
    return {
        "batch_size": size,
        "wall_s": wall_s,
        "output_tokens_per_s": size * output_tokens / wall_s,
        "decode_step_s": step_s,
        "decode_tokens_per_s": size / step_s,
        "bound_step_s": roof.decode_step_s,
        "of_bound": roof.decode_step_s / step_s,
        "host_gap_share": (after.host_gap_s - before.host_gap_s) / (after.busy_s - before.busy_s),
    }


def measure_prefill(rt: Runtime, count: int, tokens: int, machine: Machine, dtype: Any) -> Figures:
    """Time `count` prompts that are answered by one token each."""
    _answer(rt, count, tokens, 1, seed=0)  # compiles
    wall_s = _answer(rt, count, tokens, 1, seed=1)
    roof = bound(
        *(machine, rt.model_config, dtype),
        kv_dtype=rt.options.kv_dtype,
        batch_size=count,
        context=tokens,
        num_prompt_tokens=count * tokens,
        num_output_tokens=0,
    )
    return {
        "prompts": count,
        "prompt_tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": count * tokens / wall_s,
        "bound_s": roof.run_s,
        "of_bound": roof.run_s / wall_s,
    }


def trace_batch(rt: Runtime, size: int, prompt_tokens: int, output_tokens: int) -> Figures:
    """Return what the device did while it answered a batch, see `device_trace.summarise`."""
    _answer(rt, size, prompt_tokens, output_tokens, seed=2)  # compiles
    again = partial(_answer, rt, size, prompt_tokens, output_tokens, seed=3)
    return {"batch_size": size, **device_trace.trace(again)}


def _answer(rt: Runtime, size: int, prompt_tokens: int, output_tokens: int, *, seed: int) -> float:
    """Return the seconds from the submission of `size` requests to the end of the last one.

    Different seeds have different prompts, and no pages are kept from earlier runs: all runs have
    the same steps.
    """
    rt.forget_kept_pages()
    items = random_items(
        size,
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=output_tokens,
        vocab_size=rt.model_config.vocab_size,
        seed=1000 * size + seed,
    )
    begin_s = time.perf_counter()
    for pending in rt.submit_items(items):
        if (error := pending.result().error) is not None:
            raise error
    return time.perf_counter() - begin_s
