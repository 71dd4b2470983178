"""Batches of random requests against the memory roofline: decode steps, prefill, traces."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.profiler import ProfileData

from benchmarks.common.repeats import Figures
from benchmarks.common.roofline import Bound, Machine, bound
from benchmarks.common.timing import full_step_s
from jaxserve import Runtime
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import random_items


@final
@dataclass(frozen=True)
class Batches:
    """Batches of random requests to a runtime, on a machine with these rates."""

    rt: Runtime
    machine: Machine
    dtype: Any
    prompt_tokens: int
    output_tokens: int

    def measure(self, size: int) -> Figures:
        """Time decode steps of `size` sequences, and the run from the prompts to the last tokens.

        The result says if their keys and values do not fit.
        """
        rt, length = self.rt, self.prompt_tokens + self.output_tokens
        needed, stats = size * -(-length // rt.options.page_size), rt.stats()
        if needed >= stats.num_pages:
            needed_gb = needed * stats.pool_bytes / stats.num_pages / 1e9
            pool = f"of {stats.pool_bytes / 1e9:.1f} GB for them"
            why = f"{needed_gb:.1f} GB of keys and values, {pool}"
            return {"batch_size": size, "does_not_fit": why}
        self._answer(size, seed=0)  # compiles
        before, num_before = rt.stats(), len(rt.report().steps)
        wall_s = self._answer(size, seed=1)
        after = rt.stats()
        step_s = full_step_s(rt.report().steps[num_before:], size)
        if step_s is None:
            raise InvalidConfigError(f"no decode step had all {size} sequences; lower --batches")
        context = self.prompt_tokens + self.output_tokens / 2
        roof_s = self._bound(size, context, self.prompt_tokens, self.output_tokens).decode_step_s
        busy_s = after.busy_s - before.busy_s
        return {
            "batch_size": size,
            "wall_s": wall_s,
            "output_tokens_per_s": size * self.output_tokens / wall_s,
            "decode_step_s": step_s,
            "decode_tokens_per_s": size / step_s,
            "bound_step_s": roof_s,
            "of_bound": roof_s / step_s,
            "host_gap_share": (after.host_gap_s - before.host_gap_s) / busy_s,
        }

    def prefill(self, count: int, tokens: int) -> Figures:
        """Time `count` prompts that are answered by one token each."""
        one = replace(self, prompt_tokens=tokens, output_tokens=1)
        one._answer(count, seed=0)  # compiles
        wall_s = one._answer(count, seed=1)
        bound_s = self._bound(count, tokens, tokens, 0).run_s
        return {
            "prompts": count,
            "prompt_tokens": tokens,
            "wall_s": wall_s,
            "tokens_per_s": count * tokens / wall_s,
            "bound_s": bound_s,
            "of_bound": bound_s / wall_s,
        }

    def trace(self, size: int) -> Figures:
        """Return the `summarise`d trace of the device while it answered a batch."""
        self._answer(size, seed=2)  # compiles
        layers = self.rt.model_config.num_attention_layers
        return {"batch_size": size, **trace(lambda: self._answer(size, seed=3), layers)}

    def memory(self) -> Figures | None:
        """Return what the runtime planned to use of the device, and the most that JAX used so far.

        None on a device without statistics.
        """
        found = jax.devices()[0].memory_stats()
        if not found:
            return None
        stats = self.rt.stats()
        return {
            "planned_bytes": stats.pool_bytes + stats.weights_bytes + (stats.step_bytes or 0),
            "peak_bytes": found["peak_bytes_in_use"],
            "limit_bytes": found["bytes_limit"],
        }

    def _bound(self, size: int, context: float, num_prompt: int, num_output: int) -> Bound:
        config: Any = self.rt.model_config
        return bound(
            self.machine,
            config,
            self.dtype,
            kv_dtype=self.rt.options.kv_dtype,
            batch_size=size,
            context=context,
            num_prompt_tokens=size * num_prompt,
            num_output_tokens=size * num_output,
        )

    def _answer(self, size: int, *, seed: int) -> float:
        """Return the seconds from the submission of `size` requests to the end of the last one.

        Different seeds have different prompts, and no pages are kept from earlier runs: all runs
        have the same steps.
        """
        self.rt.forget_kept_pages()
        items = random_items(
            size,
            num_prompt_tokens=self.prompt_tokens,
            num_output_tokens=self.output_tokens,
            vocab_size=self.rt.model_config.vocab_size,
            seed=1000 * size + seed,
        )
        begin_s = time.perf_counter()
        for pending in self.rt.submit_items(items):
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


def trace(run: Callable[[], object], num_layers: int) -> dict[str, Any]:
    """Trace `run`, which waits for its own results, and return `summarise` of the trace.

    The model has `num_layers` layers with attention.

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
    return {**summarise(events), "launches_an_iteration": launches_of(events, num_layers)}


# The attention of decoding rows, which an iteration has once in each layer.
_DECODES = "paged_attention_split"


def launches_of(events: list[Event], num_layers: int) -> float | None:
    """Return the launches from the first layer of an iteration to that of the next one.

    It is the mean of the last quarter, in which all sequences decode; None without such kernels.
    """
    starts = np.sort([event.start_ns for event in events])
    decodes = np.sort([event.start_ns for event in events if _DECODES in event.name])
    count = len(decodes) // num_layers // 4
    if not count:
        return None
    first, last = decodes[-1 - count * num_layers], decodes[-1]
    return float(np.sum((starts >= first) & (starts < last)) / count)


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
