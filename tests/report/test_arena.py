"""The page of an arena has every policy, and no other file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.planning.arena import ArenaResult, ArenaRun, ServedRequest
from jaxserve.report.arena import arena_page, draw_arena

pytestmark = pytest.mark.fast

RUN = ArenaRun(
    version="0",
    trace="trace.csv",
    trace_bytes=1,
    start_s=0.0,
    num_requests=2,
    arrivals=None,
    max_tokens=9,
    max_context=99,
    prediction_error=None,
    model="Llama-3-8B",
    device="A100",
    max_slots=8,
    kv_memory=1 << 30,
    load=1.0,
    seed=0,
    policy="mine <b>",
    policy_file=None,
    digest="",
)


def _result(latency_s: float) -> ArenaResult:
    return ArenaResult(
        wall_s=9.0,
        requests=(
            ServedRequest(0, 0, 5, 4, 0.0, 1.0, 1.5, latency_s, 0),
            ServedRequest(1, 1, 5, 4, 2.0, -1.0, -1.0, -1.0, 0, "failed"),
        ),
        memory=((0.0, 0.1), (4.0, 0.7)),
    )


PLAYED = [
    (replace(RUN, load=load, seed=seed, policy=policy), _result(latency_s + load + seed))
    for load in (1.0, 2.0)
    for seed in (0, 1)
    for policy, latency_s in (("mine <b>", 2.0), ("orca", 3.0))
]


def test_latency_memory_and_requests_are_drawn():
    """One panel for a pool's latencies, one for memory, and a strip for each policy."""
    latency, memory, *strips = draw_arena(PLAYED).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in latency.get_lines()}
    assert lines == {"mine <b>": [[1, 3.5], [2, 4.5]], "orca": [[1, 4.5], [2, 5.5]]}
    assert [line.get_ydata().tolist() for line in memory.get_lines()] == [[10, 70]] * 2
    assert [axes.get_ylabel() for axes in strips] == ["mine <b>", "orca"]
    # The failed request has no line.
    segments = [collection.get_segments() for collection in strips[0].collections]
    assert [[s.tolist() for s in each] for each in segments] == [
        [[[0, 0], [1, 0]]],
        [[[1, 0], [1.5, 0]]],
        [[[1.5, 0], [4, 0]]],
    ]


def test_a_page_is_whole():
    """Names are escaped, and pictures are in the page."""
    page = arena_page("a & b", "about", [["policy", "p99"], ["mine <b>", "1"]], PLAYED)
    assert "<td>mine &lt;b&gt;</td>" in page and "<b>" not in page and "a &amp; b" in page
    assert page.count("<svg") == 1 and "<img" not in page and "<?xml" not in page


def test_an_arena_without_results_is_empty():
    """Nothing is drawn of runs that failed."""
    assert draw_arena([(RUN, ArenaResult(error="it raised"))]).axes == []
