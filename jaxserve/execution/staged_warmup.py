"""The executables of a model in stages, made by running them on idle stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.staged_loops import WindowPass, micro_batch_size
from jaxserve.execution.staged_steps import StagedSteps
from jaxserve.steps.packing import loop_sizes, no_masks, pack_choosing, pack_rows
from jaxserve.steps.sampling.variants import Variant

_Step = tuple[str, Callable[[], Any]]


@final
class StagedWarmup:
    """Makes every executable of a configuration; stages run them with slots that do not advance.

    Args:
      takes_masks: also what requests with a grammar need.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: Sequence[DeviceStage],
        steps: StagedSteps,
        micro_batches: int,
        *,
        takes_masks: bool,
    ):
        self._config = config
        self._stages = stages
        self._steps = steps
        self._micro_batches = micro_batches
        self._takes_masks = takes_masks

    def steps(self) -> list[_Step]:
        """Return (name, function) of every executable."""
        return [(name, partial(self._idly, step)) for name, step in self._all()]

    def _all(self) -> Iterator[_Step]:
        config = self._config
        yield "slot edits", self._edits
        for num in reversed(config.token_buckets):
            yield f"mixed step, {num} tokens", partial(self._mixed, num)
        if config.num_host_pages:
            yield "page copies", self._copies
            if config.num_incoming_pages:
                for num in reversed(config.coarse_token_buckets):
                    step = partial(self._mixed, num, brings_pages=True)
                    yield f"mixed step with pages, {num} tokens", step
        if config.has_encoder:
            for num in reversed(config.token_buckets):
                step = partial(self._steps.encode, pack_rows(config, (), num)[0])
                yield f"encoder, {num} tokens", step
        for variant in Variant:
            yield from self._sampling(variant)

    def _sampling(self, variant: Variant) -> Iterator[_Step]:
        config, name = self._config, variant.name.lower()
        for num in reversed(variant.sizes(config.head_buckets)):
            yield f"{name} sampling, {num} rows", partial(self._head, variant, num)
        for speculates in (False, True) if config.num_proposed else (False,):
            loop = "speculating loop" if speculates else "decoding"
            windows = loop_sizes(config, variant, speculates=speculates)
            sizes = {micro_batch_size(num, self._micro_batches) for num in windows}
            for num in sorted(sizes, reverse=True):
                step = partial(self._decode, variant, num, speculates)
                yield f"{name} {loop}, {num} slots", step

    def _edits(self) -> None:
        for stage in self._stages:
            with stage.programs.place.in_force():
                stage.slots.warm_up(takes_masks=self._takes_masks)

    def _copies(self) -> None:
        for stage in self._stages:
            for _, prepare in stage.pages.preparations():
                prepare()

    def _mixed(self, num_tokens: int, *, brings_pages: bool = False) -> Any:
        batch, _ = pack_rows(self._config, (), num_tokens)
        hidden, row_hidden = self._steps.pass_through(batch, brings_pages=brings_pages)
        self._steps.prompt_part((), (), batch, hidden)
        return row_hidden

    def _head(self, variant: Variant, num_rows: int) -> None:
        hidden = self._mixed(self._config.token_buckets[0])
        self._sample(hidden, variant, num_rows)
        if self._takes_masks:
            vocab_size = self._stages[-1].programs.model_config.vocab_size
            masks = no_masks(num_rows, vocab_size)
            self._sample(hidden, variant, num_rows, masks)
            if self._config.num_proposed:
                no_rows = pack_choosing(self._config, (), num_rows)
                self._steps.choose_verified(hidden, no_rows, masks, variant)

    def _decode(self, variant: Variant, num_rows: int, speculates: bool) -> None:
        window, last = range(num_rows), self._stages[-1]
        idle = WindowPass.of(last, window, (), variant, speculates=speculates)
        idle.iterate(self._stages, 0, variant)

    def _sample(self, hidden: Any, variant: Variant, num_rows: int, masks: Any = None) -> None:
        index = np.full(num_rows, self._config.max_slots, np.int32)
        none = self._stages[-1].no_outputs(num_rows, 1, variant)
        self._steps.sample(hidden, index, none, variant, masks)

    def _idly(self, step: Callable[[], Any]) -> None:
        with ExitStack() as idle:
            for stage in self._stages:
                idle.enter_context(stage.idle())
            step()
