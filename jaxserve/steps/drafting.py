"""The model that a step computes, and a small draft model that proposes tokens to it.

Both share page tables: a page has the keys and values of both models. So prefix reuse, swaps and
preemption apply to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast, final

from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.batch import AttentionBatch, IncomingPages, KVCache
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import Decoder, LayerLayout, Tap
from jaxserve.models.linear import RowKernels, use_row_kernels


def merged(graphdef: nnx.GraphDef, params: Any, config: EngineConfig) -> Any:
    """Return the model, with the kernels that the configuration selects."""
    model = nnx.merge(graphdef, params)
    if config.row_kernels is not None:
        use_row_kernels(model, cast(RowKernels, config.row_kernels))
    return model


@final
@dataclass(frozen=True)
class Drafter:
    """A draft model, for the executor of the model that it drafts for."""

    graphdef: nnx.GraphDef
    params: Any  # on the device of the served model
    config: DecoderConfig
    layer_layout: LayerLayout

    @property
    def structure(self) -> DraftStructure:
        """Return the static part, for which steps are compiled."""
        is_unrolled = self.layer_layout == "unrolled"
        return DraftStructure(self.graphdef, self.config.num_layers if is_unrolled else 1)


@final
@dataclass(frozen=True)
class DraftStructure:
    """The static part of a draft model; the last `num_buffers` buffers of the cache are its own."""

    graphdef: nnx.GraphDef
    num_buffers: int


class DraftInputs(NamedTuple):
    """The arrays of a draft model, with attention plans for the same steps as the served one's."""

    params: Any
    plans: tuple[Plan | None, ...]


def serving_model(
    graphdef: nnx.GraphDef,
    params: Any,
    config: EngineConfig,
    structure: DraftStructure | None,
    draft: DraftInputs | None,
) -> Any:
    """Return the model that a step computes: a decoder, alone or followed by a draft model."""
    model = merged(graphdef, params, config)
    if structure is None or draft is None:
        return model
    drafting = nnx.merge(structure.graphdef, draft.params)
    return FollowedModel(model, drafting, structure.num_buffers, draft.plans)


@final
class FollowedModel:
    """A decoder and its draft model over one cache, with the methods of a decoder.

    The draft model computes every token that the decoder computes, so that it has its keys and
    values.
    """

    def __init__(
        self, model: Decoder, drafting: Decoder, num_buffers: int, plans: tuple[Plan | None, ...]
    ):
        self._model = model
        self._drafting = drafting
        self._num_buffers = num_buffers
        self._plans = plans

    def tapped(
        self,
        inputs: Int32[Array, " tokens"],
        batch: AttentionBatch,
        cache: KVCache,
        tap: Tap | None,
        incoming: IncomingPages | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache, Float[Array, "rows embed"] | None]:
        own, drafts = divided(cache, self._num_buffers)
        values = (None, None)
        if incoming is not None:
            values = tuple(
                replace(incoming, values=part)
                for part in divided(incoming.values, self._num_buffers)
            )
        hidden, own, read = self._model.tapped(inputs, batch, own, tap, values[0])
        _, drafts, _ = self._drafting.tapped(inputs, self._own(batch), drafts, None, values[1])
        return hidden, united(own, drafts), read

    def with_states(self, batch: AttentionBatch, cache: KVCache) -> KVCache:
        own, drafts = divided(cache, self._num_buffers)
        return united(self._model.with_states(batch, own), drafts)

    def logits(self, hidden: Float[Array, "tokens hidden"]) -> Float32[Array, "tokens vocab"]:
        return self._model.logits(hidden)

    def draft_logits(
        self, inputs: Int32[Array, " tokens"], batch: AttentionBatch, cache: KVCache
    ) -> tuple[Float32[Array, "tokens vocab"], KVCache]:
        own, drafts = divided(cache, self._num_buffers)
        hidden, drafts = self._drafting(inputs, self._own(batch), drafts)
        return self._drafting.logits(hidden), united(own, drafts)

    def _own(self, batch: AttentionBatch) -> AttentionBatch:
        plan = self._plans[0 if batch.max_query_length == 1 else -1]
        return replace(batch, plan=plan, adapter=None)


def divided(cache: KVCache, num_last: int) -> tuple[KVCache, KVCache]:
    """Return a cache without its last buffers, and these buffers as a cache."""

    def part(of: slice) -> KVCache:
        return KVCache(
            cache.k_pages[of], cache.v_pages[of], cache.k_scales[of], cache.v_scales[of], {}
        )

    own = replace(part(slice(-num_last)), states=cache.states, inputs=cache.inputs)
    return own, part(slice(-num_last, None))


def united(one: KVCache, other: KVCache) -> KVCache:
    return KVCache(
        one.k_pages + other.k_pages,
        one.v_pages + other.v_pages,
        one.k_scales + other.k_scales,
        one.v_scales + other.v_scales,
        states=one.states,
        inputs=one.inputs,
    )
