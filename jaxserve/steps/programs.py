"""The step executables, jitted for one model, configuration and placement.

Bodies are keyed by token count and heads by request count, so compiled sizes add up instead of
multiplying. `Variant.sizes` says at which sizes a variant of a head or a decode loop is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.scheduling.plan import Row
from jaxserve.steps import decode, encoding, graph_loops, heads, mixed, stages
from jaxserve.steps.attention_planner import AttentionPlanner
from jaxserve.steps.drafting import Drafter, DraftInputs
from jaxserve.steps.executable_store import (
    ExecutableStore,
    describe_devices,
    key_of,
    these_settings,
    this_installation,
)
from jaxserve.steps.outputs import no_outputs
from jaxserve.steps.packing import (
    MixedBatch,
    Params,
    loop_sizes,
    no_masks,
    pack_choosing,
    pack_rows,
    pack_window,
)
from jaxserve.steps.preparation import prepared_together
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.slots import empty_slots
from jaxserve.steps.step_function import (
    Placement,
    Shelf,
    StepFunction,
    as_list,
    shelf_of,
    staging_place,
)


@final
class Programs:
    """The jitted steps of one model, or of a stage's part of it, for one configuration.

    Args:
      graphdef: static part of a decoder: `model.tapped(tokens, batch, cache, tap, incoming)`, which
        gives `hidden, cache, tapped`, and `model.logits(hidden)`.
      model_config: configuration of the decoder, or of its part.
      place: where parameters, cache and slots are.
      probe: of remaining lengths, which whole steps read; None for none.
      store: saves the executables for later processes; None to save none.

    Attributes:
      computed_by: what decides KV in addition to parameters: the structures of model and drafter.
      probe_params: the probe's parameters, in place; None without a probe.
      refinement: how the probe's readings change a prediction.
      stage: what a stage computes, if this is one.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: EngineConfig,
        model_config: Any,
        place: Placement,
        probe: Probe | None = None,
        store: ExecutableStore | None = None,
        drafter: Drafter | None = None,
    ):
        self.config = config
        self.model_config = model_config
        self.place = place
        self.refinement = None if probe is None else probe.refinement
        self.probe_params = None if probe is None else jax.device_put(probe.params, place.whole)
        self._step_bytes: dict[Any, int] = {}
        self._planner = AttentionPlanner.of(config, model_config, place)
        self.draft_params, self._draft_planner, drafting = None, None, None
        if drafter is not None:
            self.draft_params = as_list(jax.device_put(drafter.params, place.whole))
            self._draft_planner = AttentionPlanner.of(config, drafter.config, place)
            drafting = drafter.structure
        drafts = () if drafter is None else (drafter.graphdef, drafter.config)
        self.computed_by = (graphdef, model_config, *drafts)
        parts = (graphdef, config, model_config, probe, *drafts)
        self.shelf = shelf = shelf_of(store, place, *parts)
        bind = partial(partial, graphdef=graphdef, config=config)
        read = partial(bind, probe=probe)
        follow = partial(read, drafting=drafting)
        whole, cache = place.whole, place.cache(model_config)
        self.mixed_body = StepFunction(
            "mixed_body",
            follow(mixed.mixed_body),
            shelf,
            flattens=True,
            packs=True,
            donate_argnames="cache",
            out_shardings=(cache, whole, whole, whole),
        )
        head = partial(
            StepFunction,
            shelf=shelf,
            flattens=True,
            donate_argnames="slots",
            static_argnames="variant",
            out_shardings=whole,
        )
        self.mixed_head = head("mixed_head", read(heads.mixed_head))
        self.verifying_head = head("verifying_head", read(heads.verifying_head))
        self.decode_loop = StepFunction(
            "decode_loop",
            follow(decode.decode_loop),
            shelf,
            flattens=True,
            packs=True,
            donate_argnames=("cache", "slots"),
            static_argnames=("variant", "num_proposed"),
            out_shardings=(cache, whole, whole),
            compiler_options=loop_options(place, config.graph_loops, store),
        )
        self.prompt_logprobs = StepFunction(
            "prompt_logprobs",
            bind(mixed.score_prompts),
            shelf,
            flattens=True,
            packs=True,
            out_shardings=whole,
        )
        self.pool_rows = StepFunction(
            "pool_rows", mixed.pool_rows, shelf, packs=True, num_fixed=0, out_shardings=whole
        )
        self.score_labels = StepFunction(
            "score_labels", bind(mixed.score_labels), shelf, flattens=True, out_shardings=whole
        )
        self.stage = StagePrograms(graphdef, config, whole, cache, shelf)
        self.prompts_of = jax.jit(encoding.prompts_of, out_shardings=whole)
        self.encode = jax.jit(partial(encoding.encode, graphdef=graphdef), out_shardings=whole)
        self.write_encoded = jax.jit(
            bind(encoding.write_encoded), donate_argnames="cache", out_shardings=cache
        )
        self.no_outputs = jax.jit(
            no_outputs,
            static_argnums=(0, 1, 2),
            static_argnames="num_proposed",
            out_shardings=whole,
        )

    @classmethod
    def shared(
        cls,
        graphdef: nnx.GraphDef,
        config: EngineConfig,
        model_config: Any,
        place: Placement,
        probe: Probe | None = None,
        store: ExecutableStore | None = None,
        drafter: Drafter | None = None,
    ) -> Programs:
        """Return the programs that this process made last for equal arguments, or make them.

        Their compiled steps are not traced again, so that a second runtime of a model starts at
        once. Programs with a probe or a draft model, which hold its parameters, are always made.
        """
        if probe is not None or drafter is not None:
            return cls(graphdef, config, model_config, place, probe, store, drafter)
        return _shared(graphdef, config, model_config, place, store, these_settings())

    def plan_mixed(self, batch: MixedBatch) -> Plan | None:
        """Return the plan of attention in a mixed step, for `mixed_body`."""
        return None if self._planner is None else self._planner.mixed(batch)

    def plan_decode(
        self, rows: Sequence[Row], window: range, iteration: int = 0, num_proposed: int = 0
    ) -> Plan | None:
        """Return attention's plan for one iteration with `num_proposed`, for `stage.decode`."""
        if self._planner is None:
            return None
        return self._planner.decode(rows, window, 1 + iteration, num_proposed)

    def plan_loop(
        self, rows: Sequence[Row], window: range, num_iterations: int = 1, num_proposed: int = 0
    ) -> tuple[Plan | None, ...]:
        """Return the plans of a decode loop: of one token a row, then with proposals."""
        return _loop_plans(self._planner, rows, window, num_iterations, num_proposed)

    def draft_mixed(self, batch: MixedBatch) -> DraftInputs | None:
        """Return the draft model's arrays in a mixed step; None without one."""
        if self.draft_params is None:
            return None
        planner = self._draft_planner
        return DraftInputs(self.draft_params, (None if planner is None else planner.mixed(batch),))

    def draft_loop(
        self, rows: Sequence[Row], window: range, num_iterations: int = 1, num_proposed: int = 0
    ) -> DraftInputs | None:
        """Return the draft model's arrays in a decode loop; None without one."""
        if self.draft_params is None:
            return None
        plans = _loop_plans(self._draft_planner, rows, window, num_iterations, num_proposed)
        return DraftInputs(self.draft_params, plans)

    def pool(
        self,
        params: Params,
        hidden: Any,
        row_hidden: Any,
        batch: MixedBatch,
        rows: Sequence[Row],  # in the batch's order
    ) -> Any:
        """Return what rows that pool deliver, [slots, width], in the batch's order."""
        if self.config.pooling == "labels":
            return self.score_labels(params, row_hidden)
        if self.config.pooling == "last":
            return row_hidden
        num_pooled = np.zeros(self.config.max_slots, np.int32)
        num_pooled[: len(rows)] = [row.num_pooled for row in rows]
        return self.pool_rows(hidden, batch, num_pooled)

    def compiled_steps(
        self, params: Params, cache: KVCache, variant: Variant = Variant.FULL
    ) -> list[Any]:
        """Return the largest mixed step and decode loop, compiled for the arguments of real calls.

        The cache may be abstract. `variant` is the decode loop's; FULL takes the most memory.
        """
        cache, slots = self._placed(cache)
        batch, size = self._largest_batch(), self.config.max_slots
        loop = partial(self.prepare_loop, params, cache, slots, variant)
        most = loop_sizes(self.config, variant, speculates=True)[-1:]
        steps: list[Any] = prepared_together(
            partial(self.prepare_mixed, params, cache, slots, batch, None, self._incoming(cache)),
            partial(loop, size),
            *(partial(loop, num, self.config.num_proposed_beside(num)) for num in most),
        )
        with self.place.in_force():
            lowered = self._encoding_steps(params, cache, slots, batch)
        return steps + [step.compile() for step in lowered]

    def compiled_heads(self, params: Params, cache: KVCache) -> list[Any]:
        """Return the largest functions that follow a mixed step: sampling, and scores of prompts.

        They read the vocabulary for many rows. The cache may be abstract.
        """
        if not self.model_config.generates:
            return []
        cache, slots = self._placed(cache)
        batch, size = self._largest_batch(), self.config.max_slots
        body = self.prepare_mixed(params, cache, slots, batch, None, self._incoming(cache))
        hidden, row_hidden, tapped = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.place.whole),
            tuple(body.out_info)[1:],
        )
        sample = partial(self.mixed_head.prepare, params, slots, row_hidden)
        verify = partial(self.verifying_head.prepare, params, slots, row_hidden)
        choosing = pack_choosing(self.config, (), size)
        after = (tapped, self.probe_params)
        masks = no_masks(size, self.model_config.vocab_size)
        full = Variant.FULL
        return prepared_together(
            partial(sample, np.full(size, size, np.int32), *after, variant=full),
            partial(self.prompt_logprobs.prepare, params, slots, hidden, batch),
            *(
                [partial(verify, choosing, *after, masks, variant=full)]
                if self.config.proposes_on_host
                else []
            ),
        )

    def prepare_mixed(
        self,
        params: Params,
        cache: Any,
        slots: Any,
        batch: MixedBatch,
        inputs: Any = None,
        incoming: IncomingPages | None = None,
    ) -> jax.stages.Compiled:
        """Prepare a mixed step of a batch without rows; all other arguments may be abstract."""
        plan, draft = self.plan_mixed(batch), self.draft_mixed(batch)
        return self.mixed_body.prepare(params, cache, slots, batch, plan, inputs, incoming, draft)

    def prepare_loop(
        self,
        params: Params,
        cache: Any,
        slots: Any,
        variant: Variant,
        num_rows: int,
        num_proposed: int = 0,
    ) -> jax.stages.Compiled:
        """Prepare a decode loop over the first slots; params, cache and slots may be abstract."""
        window = range(num_rows)
        return self.decode_loop.prepare(
            params,
            cache,
            slots,
            pack_window(window, ()),
            self.plan_loop((), window, num_proposed=num_proposed),
            self.probe_params,
            self.draft_loop((), window, num_proposed=num_proposed),
            variant=variant,
            num_proposed=num_proposed,
        )

    def step_bytes(self, params: Params, cache: KVCache, *, has_heads: bool = False) -> int:
        """Return the memory of `compiled_steps` in addition to their arguments; measured once.

        `has_heads` includes that of `compiled_heads`.
        """
        leaves, structure = jax.tree.flatten((params, cache))
        shapes = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        arguments = structure, shapes, has_heads
        if arguments not in self._step_bytes:
            measure = partial(self._measured_step_bytes, params, cache, has_heads)
            name = "step_bytes, heads" if has_heads else "step_bytes"
            self._step_bytes[arguments] = self.shelf.number(name, leaves, measure)
        return self._step_bytes[arguments]

    def _measured_step_bytes(self, params: Params, cache: KVCache, has_heads: bool) -> int:
        heads = self.compiled_heads(params, cache) if has_heads else []
        return largest_step_bytes([*self.compiled_steps(params, cache), *heads])

    def compiled_stage_steps(
        self, params: Params, cache: KVCache, embed: int | None = None, *, samples: bool
    ) -> list[Any]:
        """Return the compiled steps of a stage: mixed step, one decode iteration, and head.

        `embed` is the width of the previous stage's output; None for the first stage. Only the last
        stage `samples`.
        """
        cache, slots = self._placed(cache, looks_up=samples)
        batch, rows = self._largest_batch(), self.config.max_slots
        dtype = jnp.dtype(self.model_config.dtype)

        def whole(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.place.whole)

        def inputs(num: int) -> jax.ShapeDtypeStruct | None:
            return None if embed is None else whole(jax.ShapeDtypeStruct((num, embed), dtype))

        body = self.prepare_mixed(
            params, cache, slots, batch, inputs(self.config.max_step_tokens), self._incoming(cache)
        )
        with self.place.in_force():
            lowered = self._encoding_steps(params, cache, slots, batch)
        steps = [
            body,
            *(step.compile() for step in lowered),
            self.stage.decode.prepare(
                params,
                cache,
                slots,
                pack_window(range(rows), ()),
                self.plan_decode((), range(rows)),
                inputs(rows),
                None,
            ),
        ]
        if samples:
            _, _, row_hidden, _ = body.out_info
            steps.append(
                self.mixed_head.prepare(
                    params,
                    slots,
                    whole(row_hidden),
                    np.zeros(rows, np.int32),
                    None,
                    self.probe_params,
                    variant=Variant.FULL,
                )
            )
        return steps

    def _encoding_steps(self, params: Params, cache: Any, slots: Any, batch: Any) -> list[Any]:
        """Return the lowered steps that run an encoder and write its output to decoder layers."""
        if not self.config.has_encoder:
            return []
        dtype = jnp.dtype(self.model_config.dtype)
        shape = (self.config.max_step_tokens, self.model_config.hidden_size)
        encoded = jax.ShapeDtypeStruct(shape, dtype, sharding=self.place.whole)
        steps = [self.write_encoded.lower(params, cache, slots, batch, encoded)]
        if "encoder" in params:
            prompts = jax.eval_shape(encoding.prompts_of, slots, batch)
            steps.append(self.encode.lower(params, prompts))
        return steps

    def _placed(self, cache: KVCache, *, looks_up: bool = True) -> tuple[Any, Any]:
        slots = jax.eval_shape(lambda: empty_slots(self.config, looks_up=looks_up))

        def at(place: jax.sharding.Sharding, tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
            )

        places = self.place.cache(self.model_config)
        return jax.tree.map(at, places, cache), at(self.place.whole, slots)

    def _incoming(self, cache: KVCache) -> IncomingPages | None:
        """Return abstract pages, as the largest mixed step brings; None if steps bring none."""
        count = self.config.num_incoming_pages
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
        return IncomingPages(target, values)

    def _largest_batch(self) -> MixedBatch:
        """Return the largest batch, without rows."""
        return pack_rows(self.config, (), self.config.max_step_tokens)[0]


def _loop_plans(
    planner: AttentionPlanner | None,
    rows: Sequence[Row],
    window: range,
    num_iterations: int,
    num_proposed: int,
) -> tuple[Plan | None, ...]:
    numbers = (0, num_proposed) if num_proposed else (0,)
    if planner is None:
        return (None,) * len(numbers)
    # An iteration without proposals may follow several whose proposals were all right.
    most = 1 + num_proposed
    return tuple(
        planner.decode(rows, window, num_iterations, number, most_gained=most) for number in numbers
    )


def largest_step_bytes(steps: Sequence[Any]) -> int:
    """Return the memory of the largest of these steps in addition to its arguments."""
    return max(_extra_bytes(step.memory_analysis()) for step in steps)


def _extra_bytes(analysis: Any) -> int:
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + max(0, outputs)


@lru_cache(maxsize=8)
def _shared(
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    model_config: Any,
    place: Placement,
    store: ExecutableStore | None,
    settings: str,  # of JAX, which may have changed when the next runtime is made
) -> Programs:
    return Programs(graphdef, config, model_config, place, store=store)


@final
class StagePrograms:
    """The jitted functions of `steps.stages`, and `heads.stage_head`, for one stage.

    All stages except the last use only `decode` and `append`.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: EngineConfig,
        whole: jax.sharding.Sharding,  # of slots and outputs
        cache: Any,  # the shardings of the cache
        shelf: Shelf,
    ):
        bind = partial(partial, graphdef=graphdef, config=config)
        self.decode = StepFunction(
            "stage_decode",
            bind(stages.decode),
            shelf,
            flattens=True,
            packs=True,
            donate_argnames="cache",
            out_shardings=(cache, whole),
        )
        self.append = StepFunction(
            "stage_append",
            stages.append,
            shelf,
            num_fixed=0,
            donate_argnames="slots",
            out_shardings=whole,
        )
        of_the_last = partial(
            StepFunction,
            shelf=shelf,
            flattens=True,
            static_argnames="variant",
            out_shardings=whole,
        )
        changed = ("slots", "outputs")
        self.head = of_the_last("stage_head", bind(heads.stage_head), donate_argnames=changed)
        self.choose = of_the_last(
            "stage_choose", bind(stages.choose_proposed), packs=True, donate_argnames=changed
        )
        self.propose = StepFunction(
            "stage_propose",
            stages.propose,
            shelf,
            num_fixed=0,
            packs=True,
            static_argnames="num_proposed",
            out_shardings=whole,
        )


def loop_options(
    place: Placement, wanted: bool | None, store: ExecutableStore | None
) -> dict[str, Any] | None:
    """Return the compiler options of a function with a loop; None for XLA's own choice.

    A loop whose end depends on data is decided on the host after every iteration, unless it is
    recorded in a CUDA graph. A choice in `XLA_FLAGS` precedes ours, then `wanted`, then the
    environment, and then a test. A loop with collectives is not recorded
    (docs/performance_model.md), so processes that share a mesh need no test.
    """
    device = next(iter(place.whole.device_set))
    is_gpu = device.platform in ("gpu", "cuda")
    if not is_gpu or graph_loops.OPTION in os.environ.get("XLA_FLAGS", ""):
        return None
    if wanted is None:
        wanted = graph_loops.graph_loops_in(os.environ)
    if wanted is None and jax.default_backend() == "cpu":  # compiling for a GPU that is elsewhere
        wanted = True
    if wanted is None:
        is_alone = place.mesh is None or not place.mesh.is_multi_process
        wanted = is_alone and _loops_pass(device, store)
    return graph_loops.OPTIONS if wanted else None


@cache
def _loops_pass(device: Any, store: ExecutableStore | None) -> bool:
    try:
        driver = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        driver = ""
    key = key_of("loops in graphs", this_installation(), describe_devices([device]), driver)
    return graph_loops.loops_pass(store, key)
