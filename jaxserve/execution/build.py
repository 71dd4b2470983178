"""Construction of executors for a Flax model: sizes, memory, executables, warm-up."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, cast, final

import jax
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.compatibility import (
    check_deterministic,
    check_slot_states,
    check_speculation,
)
from jaxserve.execution.compilation import executable_store, steady, warm_up
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.grouped import GroupedExecutor
from jaxserve.execution.memory_plan import PoolSize, StepBytes, leaves_room, plan_resize
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.execution.processes import allocate_host_pages, check_alike, in_group
from jaxserve.execution.sizes import CachePlan, engine_config, plan_host
from jaxserve.execution.staged import StagedExecutor
from jaxserve.execution.stages import DeviceStage, StepExecutor
from jaxserve.execution.transport import Processes
from jaxserve.execution.weights import check_dtype
from jaxserve.models.config import check_fits
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.loading import timed
from jaxserve.models.parts import cut
from jaxserve.steps.drafting import Drafter
from jaxserve.steps.probing import Probe, check_probe
from jaxserve.steps.programs import Programs, largest_step_bytes
from jaxserve.steps.step_function import Placement, abstract
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from sharding import ProcessGroup, StagePlan


@final
@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """The model, options, probe and drafter (see `check_drafter`) that executors are built from."""

    graphdef: nnx.GraphDef
    model_config: Any
    layer_layout: LayerLayout
    options: RuntimeOptions
    probe: Probe | None = None
    drafter: Drafter | None = None
    takes_masks: bool = False


def build_executor(
    spec: ExecutorSpec,
    params: Any,
    *,
    stages: StagePlan | None = None,
    group: ProcessGroup | None = None,
    processes: Processes | None = None,
) -> tuple[ModelExecutor, PoolSize]:
    """Size and allocate a page pool and slots, compile, and return the executor.

    The parameters are the whole model's, on their devices unless it has stages. All processes of
    `group` share them and make the same calls; it is None if this process has all parameters.
    `processes` are those of the encode group and of the decode group, None for one group.

    Raises:
      DeviceMemoryError: the device has too little memory.
      InvalidConfigError: the options are invalid, the parameters' dtype is not the configuration's,
        the processes have different settings, or the probe does not fit the model.
    """
    options, model_config = spec.options, spec.model_config
    names = () if options.attention is None else options.attention.split(",")
    if not set(names) <= set(IMPLEMENTATIONS):
        raise InvalidConfigError(
            f"attention={options.attention!r} is unknown; pass one of {IMPLEMENTATIONS}, or "
            "several separated by commas"
        )
    check_dtype(params, model_config.dtype)
    check_slot_states(
        model_config,
        options,
        mesh=Placement.like(jax.tree.leaves(params)[0].sharding).mesh,
        stages=stages,
        num_processes=1 if group is None else group.num_processes,
    )
    check_speculation(model_config, options)
    check_deterministic(model_config, options, spec.graphdef, params, stages)
    if spec.probe is not None:
        check_probe(spec.probe, model_config)
        if stages is not None or group is not None:
            raise InvalidConfigError(
                "probe= needs a model that is whole in one process, but this one is cut into "
                "stages or served by several processes; omit the probe"
            )
    try:
        if stages is None:
            executor, size = _build_whole(spec, params, group, processes)
        else:
            executor, size = _build_stages(spec, params, stages)
    except NotImplementedError as error:
        if options.deterministic and options.attention is None:
            raise InvalidConfigError(f"deterministic=True cannot serve: {error}") from error
        if options.attention is None:
            raise
        raise InvalidConfigError(
            f"attention={options.attention!r} cannot serve: {error}"
        ) from error
    if options.warmup:
        warm_up(executor, progress=options.progress, behind=options.warms_up_behind)
    return executor, size


def _build_whole(
    spec: ExecutorSpec, params: Any, group: ProcessGroup | None, processes: Processes | None
) -> tuple[ModelExecutor, PoolSize]:
    graphdef, model_config, options = spec.graphdef, spec.model_config, spec.options
    # Parameters are committed to their devices, like an update's; otherwise an update would compile
    # again.
    params = jax.tree.map(lambda x: jax.device_put(x, x.sharding), params)
    place = Placement.like(jax.tree.leaves(params)[0].sharding)
    if place.mesh is not None:
        check_fits(place.mesh, model_config)
    if group is not None:
        mesh = str(place.whole) if processes is None else f"groups of the processes {processes}"
        shared = _shared_settings(model_config, mesh, options)
        check_alike(group, {**shared, "tokenizer and llguidance": spec.takes_masks})
        if processes is not None:  # two device groups have no host memory
            options = replace(options, host_memory=0, restore="on_admission")
    pages = CachePlan(model_config, options, spec.layer_layout, place, spec.drafter)
    # The largest steps are compiled for the number of pages that would fit without temporaries. If
    # the same number fits with the measured temporaries, these executables are used.
    store = executable_store()
    optimistic = pages.plan(step_bytes=0).num_pages
    if options.kv_memory is None and group is None and spec.drafter is None:
        optimistic = steady(
            optimistic,
            store,
            graphdef,
            model_config,
            place.whole,
            options.page_size,
            options.kv_dtype,
            options.max_slots,
            options.max_context,
        )
    optimistic = _agreed_number(optimistic, group)

    def programs_for(config: EngineConfig) -> Programs:
        return Programs.shared(
            graphdef, config, model_config, place, spec.probe, store, spec.drafter
        )

    programs = programs_for(engine_config(model_config, options, num_pages=optimistic))
    shapes, cache_shapes = abstract(params), pages.abstract(optimistic)
    step = StepBytes(lambda: programs.step_bytes(shapes, cache_shapes))
    # A requested size, or one that processes agree on, depends on the largest step. Requested
    # kernels are tried now, so that unsuitable ones are refused.
    decides = options.kv_memory is not None or options.attention is not None or group is not None
    is_deferred = not decides and leaves_room(programs.shelf.devices[0])
    size = pages.plan(step_bytes=0 if is_deferred else step.measure())
    num_pages = _agreed_number(min(size.num_pages, optimistic), group)
    size = replace(size, num_pages=num_pages, step=step)
    host_page_bytes = size.page_bytes * _shards_on_this_host(place, group)
    num_host_pages = plan_host(
        model_config, options, page_bytes=host_page_bytes, num_pages=num_pages
    )
    config = engine_config(
        model_config,
        options,
        num_pages=num_pages,
        num_host_pages=_agreed_number(num_host_pages, group),
    )
    if num_pages != optimistic:
        programs = programs_for(config)
    with timed("cache"):
        cache = jax.block_until_ready(pages.new(num_pages, programs.shelf))
    executor = DeviceExecutor(
        config, programs, params, cache, strict=options.strict, takes_masks=spec.takes_masks
    )
    if group is None:
        return executor, size
    if config.num_host_pages:
        allocate_host_pages(executor.pages, group)
    return in_group(executor, group, processes, strict=options.strict), size


def _build_stages(
    spec: ExecutorSpec, params: Any, stages: StagePlan
) -> tuple[ModelExecutor, PoolSize]:
    model_config, options = spec.model_config, spec.options
    parts = cut(model_config, stages, spec.layer_layout)
    own = [part.params_of(params) for part in parts]
    places = [Placement.like(jax.tree.leaves(part)[0].sharding) for part in own]
    pools = [
        CachePlan(model_config.part(part.stage.layers), options, spec.layer_layout, place)
        for part, place in zip(parts, places, strict=True)
    ]
    # A page has one id on all stages, so the stage with the least memory limits their number.
    optimistic = min(pool.plan(step_bytes=0).num_pages for pool in pools)

    def programs_for(num_pages: int) -> list[Programs]:
        config = engine_config(model_config, options, num_pages=num_pages)
        return [
            Programs.shared(
                part.graphdef,
                config,
                model_config.part(part.stage.layers),
                place,
                store=executable_store(),
            )
            for part, place in zip(parts, places, strict=True)
        ]

    sizes = []
    programs = programs_for(optimistic)
    for i, (pool, program) in enumerate(zip(pools, programs, strict=True)):
        embed = None if i == 0 else model_config.hidden_size
        is_last = i == len(parts) - 1
        steps = program.compiled_stage_steps(
            own[i], pool.abstract(optimistic), embed, samples=is_last
        )
        sizes.append(pool.plan(step_bytes=largest_step_bytes(steps)))
    size = min(sizes, key=lambda each: each.num_pages)
    if size.num_pages < optimistic:
        programs = programs_for(size.num_pages)
    num_host_pages = plan_host(
        model_config,
        options,
        page_bytes=sum(pool.page_bytes * pool.place.num_shards for pool in pools),
        num_pages=size.num_pages,
    )
    built = [
        DeviceStage(
            program,
            params,
            pool.new(program.config.num_pages, program.shelf),
            num_host_pages,
            samples=i == len(parts) - 1,
        )
        for i, (program, params, pool) in enumerate(zip(programs, own, pools, strict=True))
    ]
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    executor = StagedExecutor(
        replace(programs[0].config, num_host_pages=num_host_pages),
        built,
        parts,
        whole,
        model_config.hidden_size,
        stages.micro_batches,
        strict=options.strict,
        takes_masks=spec.takes_masks,
    )
    return executor, size


def resized(executor: ModelExecutor, size: PoolSize, kv_bytes: int) -> PoolSize:
    """Return the pool's size after a resize; raise DeviceMemoryError if it does not fit."""
    if not size.page_bytes:
        raise InvalidConfigError(
            f"a page pool of {kv_bytes:,} bytes for a model without attention, which has no keys "
            "and values; create a runtime with another max_slots instead"
        )
    config = executor.config
    return plan_resize(
        executor.device,
        size,
        kv_bytes,
        wanted_pages=1 + config.max_slots * config.max_pages_per_sequence,
        num_buffers=executor.num_buffers,
    )


def _shared_settings(model_config: Any, mesh: str, options: RuntimeOptions) -> dict[str, Any]:
    """Return the settings that must be equal on all processes, by name."""
    own = ("policy", "predictor", "probe", "learns", "record", "progress")
    return {
        **{name: value for name, value in vars(options).items() if name not in own},
        **{f"model.{name}": str(value) for name, value in asdict(model_config).items()},
        "mesh": mesh,
        "JAX's version": jax.__version__,
    }


def _shards_on_this_host(place: Placement, group: ProcessGroup | None) -> int:
    """Return the number of the cache's shards that share this host's memory."""
    if group is None:
        return place.num_shards
    host, num_own = socket.gethostname(), len(place.whole.addressable_devices)
    return sum(num for name, num in group.all_gather((host, num_own)) if name == host)


def _agreed_number(num_pages: int, group: ProcessGroup | None) -> int:
    """Return the number of pages that fits on every process."""
    return num_pages if group is None else min(group.all_gather(num_pages))


def build_groups(
    spec: ExecutorSpec, places: Sequence[tuple[Any, StagePlan | None]]
) -> tuple[GroupedExecutor, PoolSize]:
    """Build and compile an executor of two device groups; return it with a pool size.

    The size is that of the pool with the largest pages. A page has one number in both groups, so
    the group with the least memory limits their number. `places` has, for the encode group and the
    decode group, parameters of the whole model and the stages to cut it into; the parameters of a
    group in one piece are on its devices. Raises what `build_executor` raises.
    """
    options = spec.options
    check_slot_states(spec.model_config, options, num_device_groups=len(places))
    own = replace(options, warmup=False, host_memory=0)
    with ExitStack() as if_one_fails:
        built: list[tuple[ModelExecutor, PoolSize]] = []
        # Answers are computed by the decode group, which alone speculates.
        for (params, stages), speculation in zip(places, (None, own.speculation), strict=True):
            group_spec = replace(spec, options=replace(own, speculation=speculation))
            built.append(build_executor(group_spec, params, stages=stages))
            if_one_fails.callback(built[-1][0].close)
        num_pages = min(executor.config.num_pages for executor, _ in built)
        for executor, _ in built:
            if executor.config.num_pages > num_pages:
                executor.resize(num_pages, ())
        groups = [cast(StepExecutor, executor) for executor, _ in built]
        grouped = GroupedExecutor(groups, strict=options.strict)
        if options.warmup:
            warm_up(grouped, progress=options.progress)
        if_one_fails.pop_all()
    largest = max((size for _, size in built), key=lambda size: size.page_bytes)
    return grouped, replace(largest, num_pages=num_pages)
