"""Metrics for Prometheus, under the names of vLLM's, with a prefix of choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from jaxserve.core.bound_outcomes import OUTCOMES, bound_outcomes
from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams
from jaxserve.runtime import RuntimeStats
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.server.engine_metrics import LABELS, EngineCollector
from jaxserve.server.errors import is_refusal

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20)
_TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 480)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)

# Weight of the newest tokens in the pace of all.
_NEW = 0.1
# Shares of answers that outgrow a promised length, see `LengthEstimate.quantile`.
_MISS_RATES = (0.5, 0.1, 0.01)
# vLLM's words for the reasons of an end.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


@final
class Metrics:
    """The metrics of one server. Counts of requests are its own, and times the engine's.

    Args:
      stats: returns the counters of the service; None while there are none.

    Attributes:
      pace_s: seconds between tokens of an answer lately; None before any came.
    """

    def __init__(self, model_name: str, prefix: str, stats: Callable[[], RuntimeStats | None]):
        self.pace_s: float | None = None
        self._registry = CollectorRegistry()
        values = (model_name, "0")
        self._registry.register(EngineCollector(prefix, values, stats))

        def make(kind: Any, name: str, text: str, **options: Any) -> Any:
            metric = kind(f"{prefix}:{name}", text, LABELS, registry=self._registry, **options)
            return metric.labels(*values)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _REQUEST_S) -> Any:
            return make(Histogram, f"{name}_seconds", text, buckets=buckets)

        self._running = make(Gauge, "num_requests_running", "Requests that have a token.")
        self._waiting = make(Gauge, "num_requests_waiting", "Requests without a token yet.")
        self._prompt = make(Counter, "prompt_tokens", "Tokens of prompts of ended requests.")
        self._output = make(Counter, "generation_tokens", "Tokens of answers of ended requests.")
        self._first_s = seconds("time_to_first_token", "From arrival to the first token.", _FIRST_S)
        self._gap_s = seconds("inter_token_latency", "Between tokens of an answer.", _TOKEN_S)
        self._each_s = seconds(
            "request_time_per_output_token", "Mean of an answer's tokens but the first.", _TOKEN_S
        )
        self._latency_s = seconds("e2e_request_latency", "From arrival to end.")
        self._queue_s = seconds("request_queue_time", "From arrival to admission.")
        self._prefill_s = seconds("request_prefill_time", "From admission to the first token.")
        self._decode_s = seconds("request_decode_time", "From the first token to the end.")
        self._inference_s = seconds("request_inference_time", "From admission to the end.")
        self._prompts = make(
            Histogram, "request_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS
        )
        self._outputs = make(
            Histogram, "request_generation_tokens", "Tokens of an answer.", buckets=_TOKENS
        )
        self._n = make(Histogram, "request_params_n", "Samples asked for.", buckets=_SAMPLES)
        self._max_tokens = make(
            Histogram, "request_params_max_tokens", "Limits of answers.", buckets=_TOKENS
        )
        self._predicted = make(
            Histogram, "request_predicted_tokens", "Expected tokens of an answer.", buckets=_TOKENS
        )
        self._wrong_by = make(
            Histogram,
            "request_prediction_error_tokens",
            "Tokens by which an answer is longer or shorter than expected.",
            buckets=_TOKENS,
        )

        def by(name: str, text: str, label: str) -> Callable[[object], Any]:
            labels = (*LABELS, label)
            counter = Counter(f"{prefix}:{name}", text, labels, registry=self._registry)
            return lambda value: counter.labels(*values, str(value))

        ends = by("request_success", "Ended requests by the reason of the end.", "finished_reason")
        self._ends = {reason: ends(word) for reason, word in _REASONS.items()}
        outgrown = by(
            "request_outgrown",
            "Predicted answers that were longer than a length that this share may outgrow.",
            "promised_miss_rate",
        )
        self._outgrown = {rate: outgrown(rate) for rate in _MISS_RATES}
        bounds = Counter(
            f"{prefix}:latency_bounds",
            "Latency bounds of requests, by what became of them.",
            (*LABELS, "bound", "outcome"),
            registry=self._registry,
        )
        self._bounds = {
            (name, outcome): bounds.labels(*values, name.removesuffix("_bound"), outcome)
            for name in BOUND_NAMES
            for outcome in OUTCOMES
        }

    def exposition(self) -> bytes:
        """Return all metrics in the text format. It may take time to ask the service."""
        return generate_latest(self._registry)

    def set_open(self, num_waiting: int, num_running: int) -> None:
        """Set the numbers of requests that have not ended."""
        self._waiting.set(num_waiting)
        self._running.set(num_running)

    def between_tokens(self, seconds: float, num_tokens: int) -> None:
        """Count the time in which a step brought an answer some tokens."""
        pace_s = seconds / num_tokens
        for _ in range(num_tokens):
            self._gap_s.observe(pace_s)
        self.pace_s = pace_s if self.pace_s is None else self.pace_s + _NEW * (pace_s - self.pace_s)

    def aborted(self) -> None:
        """Count a request that was cancelled."""
        self._ends["cancelled"].inc()

    def failed(self, error: Exception) -> None:
        """Count a request that an error has ended before its first token; not a refused one."""
        if not is_refusal(error):
            self._ends["error"].inc()

    def ended(self, completion: Completion, params: SamplingParams) -> None:
        """Count a request that has ended."""
        if completion.error is not None and completion.timing.first_token_s is None:
            self.failed(completion.error)
        else:
            self._ends[completion.finish_reason].inc()
        for each in bound_outcomes(params, completion).items():
            self._bounds[each].inc()
        if completion.error is not None:
            return
        num_prompt = len(completion.prompt_token_ids)
        num_output = sum(len(sample.token_ids) for sample in completion.samples)
        self._prompt.inc(num_prompt)
        self._output.inc(num_output)
        self._prompts.observe(num_prompt)
        self._outputs.observe(num_output)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        self._observe_times(completion)

    def predicted(self, estimate: LengthEstimate | None, sample: Sample) -> None:
        """Compare the first estimate of a sample's length, if there is one, with its length.

        A sample that was cancelled, or that failed, does not count.
        """
        if estimate is None or sample.finish_reason not in ("stop", "length"):
            return
        num_tokens = len(sample.token_ids)
        self._predicted.observe(estimate.expected_length)
        self._wrong_by.observe(abs(estimate.expected_length - num_tokens))
        for miss_rate, counter in self._outgrown.items():
            if num_tokens > estimate.quantile(miss_rate, estimate.at):
                counter.inc()

    def _observe_times(self, completion: Completion) -> None:
        times = completion.timing
        if None in (times.admitted_s, times.first_token_s, times.finished_s):
            return
        assert times.admitted_s is not None
        assert times.first_token_s is not None
        assert times.finished_s is not None
        decode_s = times.finished_s - times.first_token_s
        self._first_s.observe(times.first_token_s - times.arrival_s)
        self._latency_s.observe(times.finished_s - times.arrival_s)
        self._queue_s.observe(times.admitted_s - times.arrival_s)
        self._prefill_s.observe(times.first_token_s - times.admitted_s)
        self._decode_s.observe(decode_s)
        self._inference_s.observe(times.finished_s - times.admitted_s)
        most = max(len(sample.token_ids) for sample in completion.samples)
        if most > 1:
            self._each_s.observe(decode_s / (most - 1))
