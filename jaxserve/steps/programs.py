"""The executables: the steps, jitted for one model, configuration and placement.

Bodies are keyed by token count and heads by request count, so compiled sizes add up instead of
multiplying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.models.coming import ComingPages
from jaxserve.scheduling.plan import Row
from jaxserve.steps import functions as steps
from jaxserve.steps.attention_planner import AttentionPlanner
from jaxserve.steps.functions import MixedBatch, Params
from jaxserve.steps.packing import pack_rows
from jaxserve.steps.placement import Placement, staging_place
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.sampler import SamplingNeeds
from jaxserve.steps.slots import empty_slots
from pallas_kernels.paged_attention import Plan


@final
class Programs:
    """The jitted functions of one model, or of a stage's part of it, and one configuration.

    Args:
      graphdef: static part of a decoder: `model.tapped(tokens, batch, cache, tap, coming)`, which
        gives `hidden, cache, tapped`, and `model.logits(hidden)`.
      model_config: of the decoder, or of its part.
      place: where parameters, cache and slots live.
      probe: of remaining lengths, which whole steps read; None for none.

    Attributes:
      probe_params: the probe's, in place; None without one.
      refinement: what its readings are worth.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: EngineConfig,
        model_config: Any,
        place: Placement,
        probe: Probe | None = None,
    ):
        self.config = config
        self.model_config = model_config
        self.place = place
        self.refinement = None if probe is None else probe.refinement
        self.probe_params = None if probe is None else jax.device_put(probe.params, place.whole)
        self._planner = AttentionPlanner.of(config, model_config, place)
        bind = partial(partial, graphdef=graphdef, config=config)
        read = partial(bind, probe=probe)
        whole, pages = place.whole, place.pages
        self.mixed_body = jax.jit(
            read(steps.mixed_body),
            donate_argnames="cache",
            out_shardings=(pages, whole, whole, whole),
        )
        self.mixed_head = jax.jit(
            read(steps.mixed_head),
            donate_argnames="slots",
            out_shardings=whole,
        )
        self.decode_loop = jax.jit(
            read(steps.decode_loop),
            donate_argnames=("cache", "slots"),
            static_argnames="num_rows",
            out_shardings=(pages, whole, whole),
        )
        self.prompt_logprobs = jax.jit(bind(steps.score_prompts), out_shardings=whole)
        self.stage_decode = jax.jit(
            bind(steps.stage_decode),
            donate_argnames="cache",
            static_argnames="num_rows",
            out_shardings=(pages, whole),
        )
        self.stage_head = jax.jit(
            partial(steps.stage_head, graphdef=graphdef),
            donate_argnames=("slots", "outputs"),
            out_shardings=whole,
        )
        self.stage_append = jax.jit(
            steps.stage_append, donate_argnames="slots", out_shardings=whole
        )
        self.no_outputs = jax.jit(steps.no_outputs, static_argnums=(0, 1), out_shardings=whole)

    def plan_mixed(self, batch: MixedBatch) -> Plan | None:
        """Of attention in a mixed step, for `mixed_body`."""
        return None if self._planner is None else self._planner.mixed(batch)

    def plan_decode(
        self, rows: Sequence[Row], window_start: int, num_rows: int, num_iterations: int = 1
    ) -> Plan | None:
        """Of attention in the iterations of a decode loop, for `decode_loop`."""
        if self._planner is None:
            return None
        return self._planner.decode(rows, window_start, num_rows, num_iterations)

    def compiled_steps(self, params: Params, cache: KVCache) -> list[Any]:
        """The largest mixed step and decode loop, compiled as they will be called.

        Args:
          cache: may be abstract.
        """
        batch, scalar, needs = self._arguments()
        cache, slots = self._placed(cache)
        decode_plan = self.plan_decode((), 0, self.config.max_slots)
        loop = partial(self.decode_loop.lower, num_rows=self.config.max_slots)
        with self.place.in_force():
            lowered = [
                self.mixed_body.lower(
                    *(params, cache, slots, batch, self.plan_mixed(batch), None),
                    self._coming(cache),
                ),
                loop(
                    *(params, cache, slots, scalar, scalar, needs, decode_plan), self.probe_params
                ),
            ]
        return [step.compile() for step in lowered]

    def compiled_stage_steps(
        self, params: Params, cache: KVCache, embed: int | None = None
    ) -> list[Any]:
        """`compiled_steps` of a stage: its mixed step and one decode iteration.

        Args:
          embed: width of what comes from the stage before; None for the first one.
        """
        batch, scalar, _ = self._arguments()
        cache, slots = self._placed(cache)
        dtype = jnp.dtype(self.model_config.dtype)

        def inputs(num: int) -> jax.ShapeDtypeStruct | None:
            if embed is None:
                return None
            return jax.ShapeDtypeStruct((num, embed), dtype, sharding=self.place.whole)

        rows = self.config.max_slots
        step = partial(self.stage_decode.lower, num_rows=rows)
        with self.place.in_force():
            lowered = [
                self.mixed_body.lower(
                    *(params, cache, slots, batch, self.plan_mixed(batch)),
                    inputs(self.config.max_step_tokens),
                ),
                step(params, cache, slots, scalar, self.plan_decode((), 0, rows), inputs(rows)),
            ]
        return [step.compile() for step in lowered]

    def _placed(self, cache: KVCache) -> tuple[Any, Any]:
        """Abstract cache and slots, where they are."""
        slots = jax.eval_shape(lambda: empty_slots(self.config))

        def at(place: jax.sharding.Sharding, tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
            )

        return at(self.place.pages, cache), at(self.place.whole, slots)

    def _coming(self, cache: KVCache) -> ComingPages | None:
        """Abstract pages that the largest mixed step brings, where steps do."""
        count = self.config.num_coming_pages
        if not count:
            return None
        place = staging_place(self.place.pages)
        values = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[0], count, *leaf.shape[2:]), leaf.dtype, sharding=place
            ),
            cache,
        )
        target: Any = np.zeros(count, np.int32)
        return ComingPages(target, values)

    def _arguments(self) -> tuple[MixedBatch, Any, SamplingNeeds]:
        """The largest batch, without rows; abstract: a number, and needs."""
        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        batch, _ = pack_rows(self.config, (), self.config.max_step_tokens)
        needs = SamplingNeeds(*(flag for _ in fields(SamplingNeeds)))  # pyright: ignore[reportArgumentType]
        return batch, jax.ShapeDtypeStruct((), jnp.int32), needs


def largest_step_bytes(steps: Sequence[Any]) -> int:
    """Memory that the largest of these compiled steps needs beside its arguments."""
    return max(_extra_bytes(step.memory_analysis()) for step in steps)


def _extra_bytes(analysis: Any) -> int:
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + max(0, outputs)
