"""Batches of random requests against the memory roofline: decode steps, prefill, traces."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.profiler import ProfileData

from benchmarks.common.repeats import Figures
from benchmarks.common.roofline import Machine, bound
from benchmarks.common.timing import full_step_s
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
      size: sequences; the result says if their keys and values do not fit.
      dtype: of the weights.
      prompt_tokens, output_tokens: of each sequence.
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
        machine,
        rt.model_config,
        dtype,
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
        machine,
        rt.model_config,
        dtype,
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
    """Return the `summarise`d trace of the device while it answered a batch."""
    _answer(rt, size, prompt_tokens, output_tokens, seed=2)  # compiles
    again = partial(_answer, rt, size, prompt_tokens, output_tokens, seed=3)
    return {"batch_size": size, **trace(again)}


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


_NUM_KERNELS = 12
# Between kernels of one step the device waits for the next launch; between steps, for the host.
_LONG_GAP_NS = 20_000


@final
@dataclass(frozen=True)
class Event:
    """A kernel or a copy on a device."""

    name: str
    start_ns: float
    duration_ns: float


def trace(run: Callable[[], object]) -> dict[str, Any]:
    """Trace `run`, which waits for its own results, and return `summarise` of the trace.

    Raises:
      NotImplementedError: the trace has no events of a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-trace-") as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = list(device_events(ProfileData.from_file(str(path))))
    if not events:
        raise NotImplementedError("there is no GPU in the trace")
    return summarise(events)


def device_events(profile: Any) -> Iterable[Event]:
    """Yield every event on the streams of the first GPU of a `ProfileData`."""
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU:0"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield Event(event.name, event.start_ns, event.duration_ns)


def summarise(events: list[Event]) -> dict[str, Any]:
    """Return shares of the time from the start of the first event to the end of the last.

    `idle_share` is the time without a kernel; `long_gap_share` the part of it in gaps of 20 us and
    more, as between steps; `kernels` are those that took most of the time, seconds and calls.
    """
    start = np.asarray([event.start_ns for event in events])
    order = np.argsort(start, kind="stable")
    start = start[order]
    end = start + np.asarray([event.duration_ns for event in events])[order]
    latest = np.maximum.accumulate(end)
    gaps = np.maximum(0.0, start[1:] - latest[:-1])
    span = latest[-1] - start[0]
    taken: defaultdict[str, float] = defaultdict(float)
    calls = Counter(event.name for event in events)
    for event in events:
        taken[event.name] += event.duration_ns
    longest = sorted(taken.items(), key=lambda item: -item[1])[:_NUM_KERNELS]
    return {
        "span_s": float(span) / 1e9,
        "num_events": len(events),
        "idle_share": float(gaps.sum() / span),
        "long_gap_share": float(gaps[gaps >= _LONG_GAP_NS].sum() / span),
        "kernels": [
            {"name": name[:120], "seconds": duration_ns / 1e9, "calls": calls[name]}
            for name, duration_ns in longest
        ],
    }
