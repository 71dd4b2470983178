"""A runtime between answers: new weights, another page pool, and how long its steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final, get_args

from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.loop import Running
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.memory.page_cache import Tier
from jaxserve.planning import Origin, StepTimes, measure
from jaxserve.runtime.replicas import Replicas


@final
class Upkeep:
    """Carries out what needs the replicas' loops to stand still. `Runtime` says what each is for.

    Args:
      requests: is told of prompts that fit no more, or fit again.
      origin: of step times; follows the size of the pool.
    """

    def __init__(
        self,
        replicas: Replicas,
        requests: RequestBuilder,
        origin: Origin,
        clock: Clock,
        options: RuntimeOptions,
    ):
        self._replicas = replicas
        self._requests = requests
        self._origin = origin
        self._clock = clock
        self._warmup = options.warmup
        self._progress = options.progress

    def dismiss_followers(self) -> None:
        """See `Runtime.dismiss_followers`."""
        self._replicas.check_leads()
        with self._replicas.paused():
            self._replicas.dismiss_followers()

    def update_params(self, params: Any, running: Running) -> None:
        """See `Runtime.update_params`."""
        if running not in get_args(Running):
            raise InvalidConfigError(
                f"running={running!r} is unknown; give one of {get_args(Running)}"
            )
        self._replicas.update_params(params, running)

    def residency(self, token_ids: Sequence[int]) -> list[Tier]:
        """See `Runtime.residency`."""
        found = [r.engine.residency(token_ids) for r in self._replicas.all]
        return min(found, key=lambda tiers: tiers.count("nowhere"))

    def forget_kept_pages(self) -> None:
        """See `Runtime.forget_kept_pages`."""
        self._replicas.check_leads()
        with self._replicas.paused("keep"):
            self._replicas.forget_kept_pages()

    def resize_kv(self, size: int | str) -> int:
        """See `Runtime.resize_kv`."""
        kv_bytes = 0 if size == 0 else parse_bytes(size)
        self._replicas.check_leads()
        with (
            out_of_memory_as("resizing the page pool", "give a smaller size"),
            self._replicas.paused("keep"),
        ):
            self._replicas.resize(kv_bytes, warmup=self._warmup, progress=self._progress)
            self._requests.max_prompt_tokens = self._replicas.max_prompt_tokens
            self._origin = replace(self._origin, config=self._replicas.first.executor.config)
        return self._replicas.first.pool_size.pool_bytes

    def measure_step_times(self, rounds: int) -> StepTimes:
        """See `Runtime.measure_step_times`."""
        self._replicas.check_leads()
        with self._replicas.paused():
            times = measure(
                self._replicas.first.executor,
                self._origin,
                self._clock,
                rounds=rounds,
                progress=self._progress,
            )
            self._replicas.forget_kept_pages(keeps_disk=True)
            self._replicas.value_by(times.chunk_cost())
        return times

    def load_step_times(self, path: str | Path) -> StepTimes:
        """See `Runtime.load_step_times`."""
        times = StepTimes.load(Path(path), expected=self._origin)
        with self._replicas.paused("keep"):
            self._replicas.value_by(times.chunk_cost())
        return times
