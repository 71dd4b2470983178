"""Idle time is the time between kernels of all streams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.decode.batches import Event, launches_of, summarise, trace

pytestmark = pytest.mark.release

US = 1000


def test_gaps_are_counted_once():
    """Overlapping kernels leave no gap; short gaps are not counted as gaps between steps."""
    events = [
        Event("copy", 200 * US, 10 * US),
        Event("product", 0, 100 * US),
        Event("product", 50 * US, 20 * US),  # inside the first kernel
        Event("product", 105 * US, 45 * US),
        Event("copy", 290 * US, 10 * US),
    ]
    found = summarise(events)
    assert found["span_s"] == pytest.approx(300e-6)
    assert found["idle_share"] == pytest.approx((5 + 50 + 80) / 300)
    assert found["long_gap_share"] == pytest.approx((50 + 80) / 300)
    assert found["kernels"][0] == {"name": "product", "seconds": pytest.approx(165e-6), "calls": 3}
    assert found["num_events"] == 5


def test_a_trace_without_a_gpu_is_refused():
    """The trace is recorded and read, and then refused."""
    with pytest.raises(NotImplementedError, match="no GPU"):
        trace(lambda: jax.block_until_ready(jnp.ones(8) + 1), num_layers=1)


def test_launches_are_those_of_an_iteration_in_the_end():
    """Prompts come first; then an iteration of two layers has six launches, and eight once."""
    names = ["prompt"] * 40
    for iteration in range(16):
        layer = ["product", "jit_paged_attention_split_kernel"]
        names += ["sample", "product", *layer, *layer] + ["copy"] * 2 * (iteration == 14)
    events = [Event(name, i * 10 * US, 5 * US) for i, name in enumerate(names)]
    assert launches_of(events, num_layers=2) == (3 * 6 + 8) / 4
    assert launches_of(events[:40], num_layers=2) is None
