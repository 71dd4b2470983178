"""Metrics for Prometheus, under vLLM's names, with a configurable prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxserve.core.metrics import OUTCOMES, bound_outcomes
from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams
from jaxserve.engine.recorder import ITERATION_TOKENS
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.runtime import RuntimeStats
from jaxserve.runtime.adapters import AdapterUsage
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.server.errors import is_refusal

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20)
_TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 480)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)

# Weight of the newest tokens in the average pace.
_NEW = 0.1
# Shares of answers that exceed a promised length, see `LengthEstimate.quantile`.
_MISS_RATES = (0.5, 0.1, 0.01)
# vLLM's words for the reasons of an end.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}

_LABELS = ("model_name", "engine")


@final
class Metrics:
    """The metrics of one server. It counts requests itself; times are the engine's.

    `stats` returns the counters of the service; None while there are none. `pace_s` is the recent
    seconds between tokens of an answer; None before there are any.
    """

    def __init__(self, model_name: str, prefix: str, stats: Callable[[], RuntimeStats | None]):
        self.pace_s: float | None = None
        self._registry = CollectorRegistry()
        values = (model_name, "0")
        self._registry.register(EngineCollector(prefix, values, stats))

        def make(kind: Any, name: str, text: str, **options: Any) -> Any:
            metric = kind(f"{prefix}:{name}", text, _LABELS, registry=self._registry, **options)
            return metric.labels(*values)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _REQUEST_S) -> Any:
            return make(Histogram, f"{name}_seconds", text, buckets=buckets)

        self._running = make(Gauge, "num_requests_running", "Requests that have a token.")
        self._waiting = make(Gauge, "num_requests_waiting", "Requests without a token yet.")
        self._prompt = make(Counter, "prompt_tokens", "Tokens of prompts that are computed.")
        self._output = make(Counter, "generation_tokens", "Tokens of answers, by step.")
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
            labels = (*_LABELS, label)
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
            (*_LABELS, "bound", "outcome"),
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
        self._waiting.set(num_waiting)
        self._running.set(num_running)

    def prompted(self, num_tokens: int) -> None:
        """Count the tokens of a prompt, once: with its answer's first token, or at the end."""
        self._prompt.inc(num_tokens)

    def generated(self, num_tokens: int) -> None:
        """Count what a step has added to an answer, which may be aborted later."""
        self._output.inc(num_tokens)

    def between_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record the time in which a step generated some tokens of an answer."""
        pace_s = seconds / num_tokens
        for _ in range(num_tokens):
            self._gap_s.observe(pace_s)
        self.pace_s = pace_s if self.pace_s is None else self.pace_s + _NEW * (pace_s - self.pace_s)

    def aborted(self) -> None:
        self._ends["cancelled"].inc()

    def failed(self, error: Exception) -> None:
        """Count a request that failed before its first token; refused requests do not count."""
        if not is_refusal(error):
            self._ends["error"].inc()

    def ended(self, completion: Completion, params: SamplingParams) -> None:
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
        self._prompts.observe(num_prompt)
        self._outputs.observe(num_output)
        self._n.observe(params.n)
        if params.max_tokens is not None and not params.pools:
            self._max_tokens.observe(params.max_tokens)
        self._observe_times(completion)

    def predicted(self, estimate: LengthEstimate | None, sample: Sample) -> None:
        """Compare a sample's first estimated length with its length, if it has neither failed nor
        been cancelled.
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
        if times.first_token_s is None or times.finished_s is None:
            return
        admitted_s = times.admitted_s
        if admitted_s is None:  # a grammar forced the whole answer, without a step
            admitted_s = times.first_token_s
        decode_s = times.finished_s - times.first_token_s
        self._first_s.observe(times.first_token_s - times.arrival_s)
        self._latency_s.observe(times.finished_s - times.arrival_s)
        self._queue_s.observe(admitted_s - times.arrival_s)
        # A grammar forces the first tokens before the prompt is computed.
        self._prefill_s.observe(max(0.0, times.first_token_s - admitted_s))
        self._decode_s.observe(decode_s)
        self._inference_s.observe(times.finished_s - admitted_s)
        most = max(len(sample.token_ids) for sample in completion.samples)
        if most > 1:
            self._each_s.observe(decode_s / (most - 1))


@final
class EngineCollector(Collector):
    """The counters of the service at the time of a scrape."""

    def __init__(
        self, prefix: str, values: tuple[str, ...], stats: Callable[[], RuntimeStats | None]
    ):
        self._prefix = prefix
        self._values = values
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Return no names, so that registration does not ask the service."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        usage = stats.num_pages_owned / max(1, stats.num_pages_usable)
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", "Used part of the KV.", usage)
        yield self._config(stats)
        yield self._pages(stats)
        yield self._iterations(stats)
        if stats.adapters is not None:
            yield self._adapters(stats.adapters)
        if stats.plan is not None:
            yield from self._schedule(stats.plan)
        page_bytes = stats.pool_bytes // max(1, stats.num_pages)
        counts: dict[str, tuple[str, float]] = {
            "num_preemptions": ("Sequences sent back to wait.", stats.num_preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.num_prefix_queried),
            "prefix_cache_hits": ("Looked up tokens that were cached.", stats.num_prefix_hit),
            "prefix_cache_evicted": ("Looked up tokens evicted before.", stats.num_evicted_tokens),
            "state_snapshots_saved": (
                "States of recurrent layers that were kept.",
                stats.num_snapshots_saved,
            ),
            "state_snapshots_restored": (
                "Sequences that began with a kept state.",
                stats.num_snapshots_restored,
            ),
            "state_snapshots_out": ("Kept states copied to the host.", stats.num_snapshots_out),
            "state_snapshots_in": ("Kept states copied back.", stats.num_snapshots_in),
            "reservations_outgrown": (
                "Preempted sequences that were longer than predicted.",
                stats.num_outgrown,
            ),
            "length_estimates_refined": ("Estimates that a probe changed.", stats.num_refined),
            "recomputed_tokens": ("Tokens computed again.", stats.num_recomputed),
            "constrained_requests": ("Requests with a grammar.", stats.num_constrained),
            "forced_tokens": ("Output tokens that grammars forced.", stats.num_forced),
            "spec_decode_num_drafts": (
                "Times that proposals of a sequence were computed.",
                stats.num_drafts,
            ),
            "spec_decode_num_draft_tokens": ("Proposals computed.", stats.num_draft_tokens),
            "spec_decode_num_accepted_tokens": (
                "Proposals that became output.",
                stats.num_accepted_tokens,
            ),
            "token_mask_seconds": ("Seconds of host threads for masks.", stats.mask_s),
            "engine_steps": ("Steps of the device.", stats.num_steps),
            "computed_tokens": ("Tokens computed.", stats.num_tokens),
            "padding_tokens": ("Tokens computed for idle slots.", stats.num_padding_tokens),
            "compilations": ("Compilations.", stats.num_compilations),
            "engine_busy_seconds": ("Seconds with work.", stats.busy_s),
            "host_gap_seconds": ("Seconds with work and an idle device.", stats.host_gap_s),
            "planning_seconds": ("Seconds of planning.", stats.planning_s),
            "predicting_seconds": ("Seconds of predicting lengths.", stats.predicting_s),
        }
        for name, (text, count) in counts.items():
            yield self._family(CounterMetricFamily, name, text, count)
        yield self._by(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Proposals that became output, by their place in a draft.",
            "position",
            {str(place): num for place, num in enumerate(stats.num_accepted_by_place)},
        )
        on_device = stats.num_prefix_hit - stats.num_prefix_hit_on_host
        yield self._by(
            CounterMetricFamily,
            "prefix_cache_tier_hits",
            "Tokens found in each tier.",
            "tier",
            {
                "device": on_device - stats.num_prefix_hit_on_disk,
                "host": stats.num_prefix_hit_on_host,
                "disk": stats.num_prefix_hit_on_disk,
            },
        )
        yield self._by(
            CounterMetricFamily,
            "kv_moved_bytes",
            "Bytes of pages copied between device, host and disk.",
            "direction",
            {
                "to_host": stats.num_pages_out * page_bytes,
                "to_device": stats.num_pages_in * page_bytes,
                "to_disk": stats.num_pages_to_disk * page_bytes,
                "from_disk": stats.num_pages_from_disk * page_bytes,
            },
        )

    def _family(self, kind: Any, name: str, text: str, value: float) -> Metric:
        family = kind(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _by(
        self, kind: Any, name: str, text: str, label: str, counts: Mapping[str, float]
    ) -> Metric:
        family = kind(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for value, count in counts.items():
            family.add_metric((*self._values, value), count)
        return family

    def _config(self, stats: RuntimeStats) -> Metric:
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "Sizes.", labels=labels)
        family.add_metric((*self._values, str(stats.page_size), str(stats.num_pages)), 1)
        return family

    def _pages(self, stats: RuntimeStats) -> Metric:
        family = GaugeMetricFamily(
            f"{self._prefix}:kv_pages",
            "Pages by what they are used for.",
            labels=(*_LABELS, "tier", "state"),
        )
        free = stats.num_pages_usable - stats.num_pages_owned - stats.num_pages_cached
        # Reservations take free pages first, and then cached ones.
        evictable = max(0, stats.num_pages_reserved - free)
        counts = {
            ("device", "owned"): stats.num_pages_owned,
            ("device", "reserved"): stats.num_pages_reserved,
            ("device", "cached"): stats.num_pages_cached - evictable,
            ("device", "free"): free - (stats.num_pages_reserved - evictable),
            ("host", "used"): stats.num_host_pages_used,
            ("host", "free"): stats.num_host_pages - stats.num_host_pages_used,
            ("disk", "used"): stats.num_disk_pages,
        }
        for labels, count in counts.items():
            family.add_metric((*self._values, *labels), count)
        return family

    def _iterations(self, stats: RuntimeStats) -> Metric:
        family = HistogramMetricFamily(
            f"{self._prefix}:iteration_tokens_total", "Tokens of an iteration.", labels=_LABELS
        )
        bounds = (*map(str, map(float, ITERATION_TOKENS)), "+Inf")
        counts = accumulate(stats.num_iterations_by_tokens)
        buckets = list(zip(bounds, counts, strict=True))
        family.add_metric(self._values, buckets, sum_value=stats.num_tokens)
        return family

    def _adapters(self, usage: AdapterUsage) -> Metric:
        """Return the adapters of open requests as labels; the newest sample counts."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            f"{self._prefix}:lora_requests_info",
            "Adapters of open requests.",
            labels=(*_LABELS, *labels),
        )
        own = (str(usage.max_adapters), ",".join(usage.running), ",".join(usage.waiting))
        family.add_metric((*self._values, *own), time.time())
        return family

    def _schedule(self, plan: SchedulePlan) -> Iterator[Metric]:
        """Yield the current schedule, its bounds, and the seconds that it is expected to take."""
        text = "The schedule in force."
        yield self._by(GaugeMetricFamily, "schedule_info", text, "schedule", {plan.name: 1})
        expected = {name: getattr(plan, name) for name in ("latency_s", "first_token_s", "token_s")}
        for name, text, seconds in (
            ("schedule_bound_seconds", "Bounds of the schedule in force.", plan.bounds.finite()),
            ("schedule_expected_seconds", "What it is expected to take.", expected),
        ):
            of = {what.removesuffix("_s"): value for what, value in seconds.items()}
            yield self._by(GaugeMetricFamily, name, text, "of", of)
