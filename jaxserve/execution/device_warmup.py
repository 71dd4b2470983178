"""The executables of a device executor, made without running a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_slots import DeviceSlots
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.state_moves import StateMoves
from jaxserve.steps.packing import (
    head_sizes,
    loop_sizes,
    no_masks,
    pack_choosing,
    pack_rows,
    pack_window,
)
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.step_function import abstract

_Step = tuple[str, Callable[[], Any]]

# Seconds before executables are made behind requests, if those that are needed first are loaded
# early: a process that answers one prompt ends before.
_DELAY_S = 4.0

_SMALLEST, _LARGER = slice(1), slice(1, None)


@final
class DeviceWarmup:
    """Makes every executable of a configuration from the shapes of what it will be called with.

    The object holds no array of the executor, so that it can work beside running steps.

    Args:
      takes_masks: also what requests with a grammar need.
    """

    def __init__(
        self,
        config: EngineConfig,
        programs: Programs,
        params: Any,
        slots: DeviceSlots,
        pages: DevicePages,
        states: StateMoves,
        *,
        takes_masks: bool = False,
    ):
        self._config = config
        self._programs = programs
        self._params, self._cache, self._state = abstract((params, pages.cache, slots.state))
        self._edits = slots.preparations() + states.preparations(pages)
        self._takes_masks = takes_masks
        self._edits_for_grammars = slots.preparations_for_grammars()
        self._copies = pages.preparations() if config.num_host_pages else ()
        self._incoming = pages.abstract_incoming(config.num_incoming_pages)

    def steps(self) -> list[_Step]:
        """Return (name, function), those first that most requests need first."""
        return [*self._first(), *self._later()]

    @property
    def num_first(self) -> int:
        """Number of leading `steps` that a request may wait for that runs alone."""
        return len(list(self._first()))

    def behind(self, on_end: Callable[[], None]) -> Preparation:
        """Make the executables on other threads, in the order of `steps`.

        `Preparation.has_first` says whether a request that runs alone waits for none.

        Args:
          on_end: called when all are made.
        """
        first, delay_s = list(self._first()), _DELAY_S if self._programs.shelf.knows_first else 0.0
        return Preparation([*first, *self._later()], on_end, num_first=len(first), delay_s=delay_s)

    def _first(self) -> Iterator[_Step]:
        """Yield what a prompt of any length and a greedy or drawn answer need, one at a time."""
        num_tokens, *others = self._config.coarse_token_buckets
        yield self._body(num_tokens)
        yield from self._variant(Variant.GREEDY, _SMALLEST)
        yield from self._edits
        yield from map(self._body, others)
        yield from self._variant(Variant.RANDOM, _SMALLEST)

    def _later(self) -> Iterator[_Step]:
        """Yield the rest: more sequences at once, and last what few requests ask for."""
        tokens = self._config.coarse_token_buckets
        yield from (self._body(size) for size in self._config.token_buckets if size not in tokens)
        yield from self._variant(Variant.GREEDY, _LARGER)
        yield from self._copies
        if self._incoming is not None and self._config.num_host_pages:
            yield from map(self._body_with_pages, tokens)
        yield from self._variant(Variant.RANDOM, _LARGER)
        yield from self._variant(Variant.FULL, slice(None))
        yield from map(self._scores, tokens)
        if self._takes_masks:
            yield from self._edits_for_grammars
            yield from self._masked_heads()

    def _masked_heads(self) -> Iterator[_Step]:
        for variant in Variant:
            for num_rows in head_sizes(self._config, variant, has_masks=True):
                name = f"{variant.name.lower()} sampling with masks, {num_rows} rows"
                yield name, partial(self._head, variant, num_rows, masked=True)
                if self._config.num_proposed and num_rows > 1:
                    yield f"{name}, of proposals", partial(self._verifying_head, variant, num_rows)

    def _variant(self, variant: Variant, part: slice) -> Iterator[_Step]:
        """Yield a part of the sizes of a variant, which increase."""
        name = variant.name.lower()
        for num_rows in variant.sizes(self._config.slot_buckets)[part]:
            yield (
                f"{name} decode loop, {num_rows} slots",
                partial(self._decode, variant, num_rows, 0),
            )
        for num_rows in variant.sizes(self._config.head_buckets)[part]:
            yield f"{name} sampling, {num_rows} rows", partial(self._head, variant, num_rows)
        for num_rows in loop_sizes(self._config, variant, speculates=True)[part]:
            num_proposed = self._config.num_proposed_beside(num_rows)
            loop = partial(self._decode, variant, num_rows, num_proposed)
            yield f"{name} speculating loop, {num_rows} slots", loop

    def _body(self, num_tokens: int) -> _Step:
        return _body_name(num_tokens), partial(self._mixed, num_tokens, None)

    def _body_with_pages(self, num_tokens: int) -> _Step:
        step = partial(self._mixed, num_tokens, self._incoming)
        return f"mixed step with pages, {num_tokens} tokens", step

    def _scores(self, num_tokens: int) -> _Step:
        return f"scores of prompts, {num_tokens} tokens", partial(self._prompt_scores, num_tokens)

    def _mixed(self, num_tokens: int, incoming: Any) -> jax.stages.Compiled:
        batch, _ = pack_rows(self._config, (), num_tokens)
        return self._programs.mixed_body.prepare(
            *(self._params, self._cache, self._state, batch),
            *(self._programs.plan_mixed(batch), None, incoming),
            abstract(self._programs.draft_mixed(batch)),
        )

    def _outputs(self, num_tokens: int) -> list[Any]:
        """Return the shapes of hidden states, those of rows, and what the probe reads."""
        _, *outputs = self._mixed(num_tokens, None).out_info

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            whole = self._programs.place.whole
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

        return jax.tree.map(placed, outputs)

    def _prompt_scores(self, num_tokens: int) -> None:
        batch, _ = pack_rows(self._config, (), num_tokens)
        hidden, _, _ = self._outputs(num_tokens)
        self._programs.prompt_logprobs.prepare(self._params, self._state, hidden, batch)

    def _head(self, variant: Variant, num_rows: int, *, masked: bool = False) -> None:
        _, row_hidden, tapped = self._outputs(self._config.coarse_token_buckets[0])
        index = np.full(num_rows, self._config.max_slots, np.int32)
        vocab_size = self._programs.model_config.vocab_size
        self._programs.mixed_head.prepare(
            *(self._params, self._state, row_hidden, index, tapped, self._programs.probe_params),
            *((no_masks(num_rows, vocab_size),) if masked else ()),
            variant=variant,
        )

    def _verifying_head(self, variant: Variant, num_rows: int) -> None:
        _, row_hidden, tapped = self._outputs(self._config.coarse_token_buckets[0])
        vocab_size = self._programs.model_config.vocab_size
        self._programs.verifying_head.prepare(
            *(self._params, self._state, row_hidden, pack_choosing(self._config, (), num_rows)),
            *(tapped, self._programs.probe_params, no_masks(num_rows, vocab_size)),
            variant=variant,
        )

    def _decode(self, variant: Variant, num_rows: int, num_proposed: int) -> None:
        window = range(num_rows)
        self._programs.decode_loop.prepare(
            *(self._params, self._cache, self._state, pack_window(window, ())),
            *(self._programs.plan_loop((), window, num_proposed=num_proposed),),
            self._programs.probe_params,
            abstract(self._programs.draft_loop((), window, num_proposed=num_proposed)),
            variant=variant,
            num_proposed=num_proposed,
        )


def made_bodies(preparing: Preparation | None) -> Callable[[int], bool] | None:
    """Return a function that says whether mixed steps of a size exist; None if none are being made.

    Args:
      preparing: as `DeviceWarmup.behind` returned it.
    """
    if preparing is None:
        return None
    return lambda num_tokens: preparing.is_made(_body_name(num_tokens))


def _body_name(num_tokens: int) -> str:
    return f"mixed step, {num_tokens} tokens"
