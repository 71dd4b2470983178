"""What a runtime logs unasked: what it serves, and every ten seconds of work how it fares."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, final

import jax

from jaxserve.core.gpus import describe_memory
from jaxserve.runtime.replicas import Replicas

_log = logging.getLogger(__name__)
_PERIOD_S = 10.0


def log_start(model_config: Any, replicas: Replicas, weights_bytes: int) -> None:
    """Log the model, its device and its memory, with the requests that fit."""
    if not _log.isEnabledFor(logging.INFO):
        return
    executor = replicas.first.executor
    config, arrays = executor.config, jax.tree.leaves(executor.params)
    devices = set().union(*(array.sharding.device_set for array in arrays))
    _log.info(
        "model: %s, %d layers, %.3g GB of weights in %s",
        type(model_config).__name__.removesuffix("Config"),
        model_config.num_layers,
        weights_bytes / 1e9,
        model_config.dtype,
    )
    _log.info(
        "devices: %d x %s in %d replica(s)",
        len(devices) * len(replicas.all),
        min(device.device_kind for device in devices),
        len(replicas.all),
    )
    if executor.device.platform != "cpu":
        _log.info("%s", describe_memory(executor.device, os.environ))
    num_tokens = config.num_pages * config.page_size
    _log.info(
        "memory: %.3g GB for keys and values of %s tokens: %d requests of 1,000 tokens, %d of the "
        "longest context, %s; at most %d run at once",
        replicas.first.pool_size.pool_bytes / 1e9,
        f"{num_tokens:,}",
        num_tokens // 1000,
        num_tokens // config.max_context,
        f"{config.max_context:,}",
        config.max_slots,
    )


@final
@dataclass(frozen=True)
class _Counts:
    seconds: float
    num_tokens: int
    num_queried: int
    num_hit: int
    num_preemptions: int

    @classmethod
    def of(cls, replicas: Replicas) -> _Counts:
        stats = [replica.engine.stats for replica in replicas.all]
        return cls(
            time.monotonic(),
            sum(each.num_tokens for each in stats),
            sum(each.num_prefix_queried for each in stats),
            sum(each.num_prefix_hit for each in stats),
            sum(each.num_preemptions for each in stats),
        )


@final
class StatusLog:
    """A thread that logs a line every ten seconds in which tokens were computed.

    It reads counters, and so never waits for the engines. Without a log for it there is none.
    """

    def __init__(self, replicas: Replicas, period_s: float = _PERIOD_S):
        self._closing = threading.Event()
        if _log.isEnabledFor(logging.INFO):
            args = (replicas, self._closing, period_s)
            threading.Thread(target=_watch, args=args, name="jaxserve-status", daemon=True).start()

    def close(self) -> None:
        self._closing.set()


def _watch(replicas: Replicas, closing: threading.Event, period_s: float) -> None:
    before = _Counts.of(replicas)
    while not closing.wait(period_s):
        now = _Counts.of(replicas)
        if now.num_tokens > before.num_tokens:
            _log.info("%s", _line(replicas, before, now))
        before = now


def _line(replicas: Replicas, before: _Counts, now: _Counts) -> str:
    schedulers = [replica.engine.scheduler for replica in replicas.all]
    usages = [each.page_usage() for each in schedulers]
    num_usable = sum(usage.num_usable for usage in usages)
    parts = [
        f"{(now.num_tokens - before.num_tokens) / (now.seconds - before.seconds):.0f} tokens/s",
        f"{sum(len(each.running) for each in schedulers)} running",
        f"{sum(each.num_waiting for each in schedulers)} waiting",
        f"{sum(usage.num_owned for usage in usages) / max(1, num_usable):.0%} of pages in use",
    ]
    if queried := now.num_queried - before.num_queried:
        parts.append(f"{(now.num_hit - before.num_hit) / queried:.0%} of prompt tokens cached")
    if preempted := now.num_preemptions - before.num_preemptions:
        parts.append(f"{preempted} preempted")
    return ", ".join(parts)
