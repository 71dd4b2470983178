"""Figures of a run, for completions with known times."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import EmptyPromptError
from jaxserve.core.metrics import goodput, spread, summarise
from jaxserve.core.request import Completion, Sample, Timing

pytestmark = pytest.mark.fast


def _completion(num_output: int, first_s: float, last_s: float) -> Completion:
    return Completion(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        samples=(Sample(text="", token_ids=(5,) * num_output, finish_reason="length"),),
        timing=Timing(arrival_s=10.0, first_token_s=10 + first_s, finished_s=10 + last_s),
    )


def test_rates_and_latencies():
    """Rates divide by the wall time; the time per token excludes the first token."""
    figures = summarise([_completion(11, 1.0, 3.0), _completion(1, 2.0, 2.0)], wall_s=4.0)
    assert figures["output_tokens"] == 12
    assert figures["prompt_tokens"] == 6
    assert figures["output_tokens_per_s"] == 3.0
    assert figures["requests_per_s"] == 0.5
    waits = {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99}
    assert figures["time_to_first_token_s"] == pytest.approx(waits)
    rates = {"mean": 0.2, "p50": 0.2, "p90": 0.2, "p99": 0.2}
    assert figures["normalised_latency_s"]["p50"] == pytest.approx((3 / 11 + 2 / 1) / 2)
    assert figures["time_per_output_token_s"] == pytest.approx(rates)


def test_failed_requests_count_as_failed_only():
    """A failed request is not in any rate or latency."""
    failed = Completion(
        request_id="r",
        prompt_token_ids=(),
        samples=(Sample(text="", token_ids=(), finish_reason="error"),),
        timing=Timing(arrival_s=10.0),
        error=EmptyPromptError("no tokens"),
    )
    figures = summarise([failed], wall_s=1.0)
    assert (figures["num_requests"], figures["num_failed"]) == (1, 1)
    assert figures["output_tokens"] == 0
    assert figures["latency_s"] is None


def test_goodput_needs_both_bounds():
    """A request counts if its first token and its pace are in time; one token alone has no pace."""
    done = [_completion(11, 1.0, 3.0), _completion(11, 2.0, 3.0), _completion(1, 1.0, 1.0)]
    within = goodput(done, 4.0, max_first_token_s=1.5, max_time_per_output_token_s=0.25)
    assert within == {"share": pytest.approx(2 / 3), "requests_per_s": 0.5}
    assert goodput(done, 4.0, max_time_per_output_token_s=0.15)["share"] == pytest.approx(2 / 3)
    assert goodput(done, 4.0)["share"] == 1.0
    assert goodput([], 4.0) == {"share": 0.0, "requests_per_s": 0.0}


def test_spread_interpolates():
    """The 90th percentile of 0 to 10 is 9; a single value is every percentile."""
    assert spread([float(x) for x in range(11)]) == {
        "mean": 5.0,
        "p50": 5.0,
        "p90": 9.0,
        "p99": 9.9,
    }
    assert spread([2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0}
