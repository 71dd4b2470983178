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
from jaxserve.steps.packing import head_sizes, loop_sizes, no_masks, pack_rows, pack_window
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.step_function import abstract

_Step = tuple[str, Callable[[], Any]]


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

    def steps(self) -> Iterator[_Step]:
        """Yield (name, function), those first that most requests need first.

        These are a short prompt's step and greedy decoding of few sequences, then longer prompts
        and more sequences, then random draws, and last what few requests ask for.
        """
        config = self._config
        tokens = list(config.token_buckets)
        yield self._body(tokens[0])
        yield from self._variant(Variant.GREEDY, 1)
        yield from self._edits
        yield from map(self._body, tokens[1:])
        yield from self._variant(Variant.GREEDY, None)
        yield from self._copies
        if self._incoming is not None and config.num_host_pages:
            yield from map(self._body_with_pages, tokens)
        yield from self._variant(Variant.RANDOM, None)
        yield from self._variant(Variant.FULL, None)
        yield from map(self._scores, tokens)
        if self._takes_masks:
            yield from self._edits_for_grammars
            sizes = config.body_buckets(has_masks=True)
            yield from (self._body(size) for size in sizes if size not in tokens)
            yield from self._masked_heads()

    def _masked_heads(self) -> Iterator[_Step]:
        for variant in (Variant.RANDOM, Variant.FULL):
            for num_rows in head_sizes(self._config, variant, has_masks=True):
                name = f"{variant.name.lower()} sampling with masks, {num_rows} rows"
                yield name, partial(self._head, variant, num_rows, masked=True)

    def _variant(self, variant: Variant, most: int | None) -> Iterator[_Step]:
        """Yield the `most` smallest sizes of a variant; without it all, or the greedy rest."""
        begin = 1 if variant is Variant.GREEDY and most is None else 0
        name = variant.name.lower()
        for num_rows in variant.sizes(self._config.slot_buckets)[begin:most]:
            yield (
                f"{name} decode loop, {num_rows} slots",
                partial(self._decode, variant, num_rows, 0),
            )
        for num_rows in variant.sizes(self._config.head_buckets)[begin:most]:
            yield f"{name} sampling, {num_rows} rows", partial(self._head, variant, num_rows)
        if num := self._config.num_proposed:
            for num_rows in loop_sizes(self._config, variant, num)[begin:most]:
                loop = partial(self._decode, variant, num_rows, num)
                yield f"{name} speculating loop, {num_rows} slots", loop

    def _body(self, num_tokens: int) -> _Step:
        return f"mixed step, {num_tokens} tokens", partial(self._mixed, num_tokens, None)

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
        _, row_hidden, tapped = self._outputs(self._config.token_buckets[0])
        index = np.full(num_rows, self._config.max_slots, np.int32)
        vocab_size = self._programs.model_config.vocab_size
        self._programs.mixed_head.prepare(
            *(self._params, self._state, row_hidden, index, tapped, self._programs.probe_params),
            *((no_masks(num_rows, vocab_size),) if masked else ()),
            variant=variant,
        )

    def _decode(self, variant: Variant, num_rows: int, num_proposed: int) -> None:
        window = range(num_rows)
        self._programs.decode_loop.prepare(
            *(self._params, self._cache, self._state, pack_window(window, ())),
            *(self._programs.plan_decode((), window, num_proposed=num_proposed),),
            self._programs.probe_params,
            variant=variant,
            num_proposed=num_proposed,
        )
