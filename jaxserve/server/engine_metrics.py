"""Metrics of the engine for Prometheus, read from its counters when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxserve.engine.stats import ITERATION_TOKENS
from jaxserve.planning.schedules.plan import Plan
from jaxserve.runtime import RuntimeStats
from jaxserve.runtime.adapters import AdapterUsage

LABELS = ("model_name", "engine")


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
        """Yield the metrics; none while there is no service."""
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
        family = kind(f"{self._prefix}:{name}", text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _by(
        self, kind: Any, name: str, text: str, label: str, counts: Mapping[str, float]
    ) -> Metric:
        family = kind(f"{self._prefix}:{name}", text, labels=(*LABELS, label))
        for value, count in counts.items():
            family.add_metric((*self._values, value), count)
        return family

    def _config(self, stats: RuntimeStats) -> Metric:
        labels = (*LABELS, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "Sizes.", labels=labels)
        family.add_metric((*self._values, str(stats.page_size), str(stats.num_pages)), 1)
        return family

    def _pages(self, stats: RuntimeStats) -> Metric:
        family = GaugeMetricFamily(
            f"{self._prefix}:kv_pages", "Pages by what they are used for.",
            labels=(*LABELS, "tier", "state"),
        )  # fmt: skip
        free = stats.num_pages_usable - stats.num_pages_owned - stats.num_pages_cached
        # Reservations take free pages, and then cached ones.
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
            f"{self._prefix}:iteration_tokens_total", "Tokens of an iteration.", labels=LABELS
        )
        bounds = (*map(str, map(float, ITERATION_TOKENS)), "+Inf")
        counts = accumulate(stats.num_iterations_by_tokens)
        buckets = list(zip(bounds, counts, strict=True))
        family.add_metric(self._values, buckets, sum_value=stats.num_tokens)
        return family

    def _adapters(self, usage: AdapterUsage) -> Metric:
        """Return the adapters of open requests as labels, of which the newest sample counts."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            f"{self._prefix}:lora_requests_info", "Adapters of open requests.",
            labels=(*LABELS, *labels),
        )  # fmt: skip
        own = (str(usage.max_adapters), ",".join(usage.running), ",".join(usage.waiting))
        family.add_metric((*self._values, *own), time.time())
        return family

    def _schedule(self, plan: Plan) -> Iterator[Metric]:
        """Yield the schedule in force, its bounds, and the seconds that it is expected to take."""
        text = "The schedule in force."
        yield self._by(GaugeMetricFamily, "schedule_info", text, "schedule", {plan.name: 1})
        expected = {name: getattr(plan, name) for name in ("latency_s", "first_token_s", "token_s")}
        for name, text, seconds in (
            ("schedule_bound_seconds", "Bounds of the schedule in force.", plan.bounds.finite()),
            ("schedule_expected_seconds", "What it is expected to take.", expected),
        ):
            of = {what.removesuffix("_s"): value for what, value in seconds.items()}
            yield self._by(GaugeMetricFamily, name, text, "of", of)
