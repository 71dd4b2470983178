"""Construction of executors for a Flax model: sizes, memory, executables, warm-up."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial, reduce
from math import prod
from typing import TYPE_CHECKING, Any, Self, cast, final

import jax
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.execution.compatibility import (
    Setting,
    check_deterministic,
    check_slot_options,
    check_together,
    grouped_windows,
)
from jaxserve.execution.compilation import executable_store, steady, warm_up
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.memory_plan import (
    PoolSize,
    StepBytes,
    free_device_bytes,
    leaves_room,
    plan_host_pages,
    plan_host_states,
    plan_pool,
    plan_resize,
    plan_snapshots,
)
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.execution.sizes import engine_config, nbytes
from jaxserve.execution.stages import DeviceStage, StepExecutor
from jaxserve.execution.weights import check_dtype
from jaxserve.kernels.paged_attention import IMPLEMENTATIONS
from jaxserve.kernels.zeros import zeros
from jaxserve.memory.page_pool import MIN_PAGES
from jaxserve.models.batch import KVCache, empty_cache
from jaxserve.models.config import check_fits
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.loading import timed
from jaxserve.models.parts import ModelPart, cut
from jaxserve.scheduling.presets import get_policy
from jaxserve.sharding import ProcessGroup, StagePlan
from jaxserve.steps.drafting import Drafter, united
from jaxserve.steps.probing import Probe, check_probe
from jaxserve.steps.programs import Programs, largest_step_bytes
from jaxserve.steps.slots import empty_slots
from jaxserve.steps.step_function import Placement, Shelf, StepFunction, abstract

# Executors of stages, of device groups and of several processes are imported where they are built.
if TYPE_CHECKING:
    from jaxserve.execution.grouped import GroupedExecutor
    from jaxserve.execution.transport import Processes


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
    layer_windows: tuple[int | None, ...] = ()  # see `EngineConfig`
    num_snapshots: int = 0

    def config(
        self, *, num_pages: int, num_host_pages: int = 0, num_host_snapshots: int = 0
    ) -> EngineConfig:
        """Return the sizes of executables and of a page pool."""
        return engine_config(
            self.model_config,
            self.options,
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            num_snapshots=self.num_snapshots,
            num_host_snapshots=num_host_snapshots,
            layer_windows=self.layer_windows,
        )


@final
@dataclass(frozen=True, eq=False)
class PlacedModel:
    """A model on its devices, or a stage's `part` of it: its executables and its page cache."""

    spec: ExecutorSpec
    place: Placement
    part: ModelPart | None = None

    @classmethod
    def of(cls, spec: ExecutorSpec, params: Any, part: ModelPart | None = None) -> Self:
        """Return the model or part whose parameters are in place."""
        return cls(spec, Placement.like(jax.tree.leaves(params)[0].sharding), part)

    @property
    def model_config(self) -> Any:
        whole = self.spec.model_config
        return whole if self.part is None else whole.part(self.part.stage.layers)

    @property
    def page_bytes(self) -> int:
        """Size of a page in all of its layers, on one device."""
        return self._device_bytes(self.abstract_cache(2).pages) // 2

    @property
    def snapshot_bytes(self) -> int:
        """Size of the state of a sequence, and of the page kept with it, on one device."""
        return self._device_bytes(_abstract_cache(self._cache_sizes(1, 1)))

    def _device_bytes(self, cache: KVCache) -> int:
        """Return the size of a cache, or of its pages alone, on one device."""
        places = self.place.cache(self.model_config)
        if not cache.states:
            places = places.pages

        def size(sharding: jax.sharding.Sharding, part: Any) -> int:
            return sum(
                prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(part)
            )

        return sum(jax.tree.leaves(jax.tree.map(size, places, cache)))

    @property
    def wanted_pages(self) -> int:
        """The number of pages with which no sequence waits for one."""
        config = self.spec.config(num_pages=MIN_PAGES)
        return 1 + config.max_slots * config.max_pages_per_sequence

    def programs(self, config: EngineConfig) -> Programs:
        spec = self.spec
        return Programs.shared(
            spec.graphdef if self.part is None else self.part.graphdef,
            # No executable of a step depends on these.
            replace(config, num_snapshots=0, num_host_snapshots=0),
            self.model_config,
            self.place,
            spec.probe,
            executable_store(),
            spec.drafter,
        )

    def plan(self, *, step_bytes: int) -> PoolSize:
        """Return the pool's size if the largest step needs `step_bytes` of temporaries."""
        draft = self.spec.config(num_pages=MIN_PAGES)
        fewest = 1 + draft.page_layout.num_tables
        kv_memory = self.spec.options.kv_memory
        return plan_pool(
            # Of several devices, one may have less free memory than the others.
            min(self.place.whole.addressable_devices, key=free_device_bytes),
            page_bytes=self.page_bytes,
            step_bytes=step_bytes,
            state_bytes=self._device_bytes(self.abstract_cache(2))
            - 2 * self.page_bytes
            + self.spec.num_snapshots * self.snapshot_bytes,
            slot_bytes=nbytes(jax.eval_shape(partial(empty_slots, draft))),
            wanted_pages=self.wanted_pages,
            min_pages=fewest,
            kv_bytes=None if kv_memory is None else parse_bytes(kv_memory),
        )

    def step_bytes(self, programs: Programs, params: Any, num_pages: int) -> int:
        """Compile the largest steps, and return the bytes of their temporaries."""
        cache = self.abstract_cache(num_pages)
        if self.part is None:
            # A pool that leaves little room must leave room for these, too.
            has_heads = not leaves_room(programs.shelf.devices[0])
            return programs.step_bytes(params, cache, has_heads=has_heads)
        layers, whole = self.part.stage.layers, self.spec.model_config
        embed = whole.hidden_size if layers.start else None
        is_last = layers.stop == whole.num_layers
        return largest_step_bytes(
            programs.compiled_stage_steps(params, cache, embed, samples=is_last)
        )

    def abstract_cache(self, num_pages: int) -> Any:
        return _abstract_cache(self._cache_sizes(num_pages))

    def new_cache(self, num_pages: int, shelf: Shelf) -> Any:
        """Return a cache of zeros on its devices."""
        return self.cache_maker(num_pages, shelf)()

    def cache_maker(self, num_pages: int, shelf: Shelf) -> StepFunction:
        """Return the function without arguments that makes the cache."""
        return self._maker(self._cache_sizes(num_pages), shelf)

    def new_snapshots(self, shelf: Shelf) -> Any:
        """Return a cache of zeros whose slots and pages are entries of snapshots; None for none."""
        num = self.spec.num_snapshots
        return self._maker(self._cache_sizes(num, num), shelf)() if num else None

    def _maker(self, sizes: tuple[Any, ...], shelf: Shelf) -> StepFunction:
        make = partial(_empty, sizes, zeros=zeros)
        return shelf.function(
            "empty_cache", make, *sizes, out_shardings=self.place.cache(self.model_config)
        )

    def _cache_sizes(self, num_pages: int, num_slots: int | None = None) -> tuple[Any, ...]:
        """Return the arguments of `empty_cache`, for each model that has keys and values.

        `num_slots` is by default that of sequences.
        """
        spec = self.spec
        engine = spec.config(num_pages=MIN_PAGES)
        layout = engine.page_layout
        num_buffers = layout.num_buffers if layout.is_grouped else None
        models = [(self.model_config, spec.layer_layout)]
        if spec.drafter is not None:
            models.append((spec.drafter.config, spec.drafter.layer_layout))
        return tuple(
            (
                config,
                num_pages,
                spec.options.page_size,
                spec.options.kv_dtype or config.dtype,
                layout,
                self.place.num_shards,
                num_slots or engine.max_slots,
                num_buffers,
            )
            for config, layout in models
        )


def _empty(sizes: tuple[tuple[Any, ...], ...], **options: Any) -> Any:
    return reduce(united, [empty_cache(*each, **options) for each in sizes])


@lru_cache(maxsize=8)
def _abstract_cache(sizes: tuple[tuple[Any, ...], ...]) -> Any:
    return jax.eval_shape(partial(_empty, sizes))


def build_executor(
    spec: ExecutorSpec,
    params: Any,
    *,
    stages: StagePlan | None = None,
    group: ProcessGroup | None = None,
    processes: Processes | None = None,
    is_group: bool = False,
) -> tuple[ModelExecutor, PoolSize]:
    """Size and allocate a page pool and slots, compile, and return the executor.

    The parameters are the whole model's, on their devices unless it has stages. All processes of
    `group` share them and make the same calls; it is None if this process has all parameters.
    `processes` are those of the encode group and of the decode group, None for one group.
    `is_group` says that the executor becomes one of two device groups of this process.

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
    setting = Setting(
        options=options,
        model_config=model_config,
        mesh=stages or Placement.like(jax.tree.leaves(params)[0].sharding).mesh,
        num_processes=1 if group is None else group.num_processes,
        has_probe=spec.probe is not None,
    )
    check_together(setting)
    if not is_group:
        spec = replace(spec, layer_windows=grouped_windows(setting))
    check_slot_options(model_config, options)
    check_deterministic(model_config, options, spec.graphdef, params, stages)
    if spec.probe is not None:
        check_probe(spec.probe, model_config)
    try:
        executor, size = _build(spec, params, stages, group, processes)
    except NotImplementedError as error:
        if options.deterministic and options.attention is None:
            raise InvalidConfigError(f"deterministic=True cannot serve: {error}") from error
        if options.attention is None:
            raise
        raise InvalidConfigError(
            f"attention={options.attention!r} cannot serve: {error}"
        ) from error
    if options.warmup:
        warm_up(
            executor,
            progress=options.progress,
            behind=options.warms_up_behind,
            for_one=options.is_for_one,
        )
    return executor, size


def _build(
    spec: ExecutorSpec,
    params: Any,
    stages: StagePlan | None,
    group: ProcessGroup | None,
    processes: Processes | None,
) -> tuple[ModelExecutor, PoolSize]:
    model_config, options = spec.model_config, spec.options
    parts: Sequence[ModelPart] = ()
    if stages is None:
        # Parameters are committed to their devices, like an update's; otherwise an update would
        # compile again.
        own = [jax.tree.map(lambda x: jax.device_put(x, x.sharding), params)]
        models = [PlacedModel.of(spec, own[0])]
        if models[0].place.mesh is not None:
            check_fits(models[0].place.mesh, model_config)
    else:
        parts = cut(model_config, stages, spec.layer_layout)
        own = [part.params_of(params) for part in parts]
        pairs = zip(own, parts, strict=True)
        models = [PlacedModel.of(spec, part_params, part) for part_params, part in pairs]
    first = models[0]
    if model_config.num_recurrent_layers:
        number = min(map(_num_snapshots, models))
        spec = replace(spec, num_snapshots=_agreed_number(number, group))
        models = [replace(model, spec=spec) for model in models]
        first = models[0]
    if group is not None:
        from jaxserve.execution.processes import check_alike

        mesh = str(first.place.whole)
        if processes is not None:
            mesh = f"groups of the processes {processes}"
        shared = _shared_settings(model_config, mesh, options)
        check_alike(group, {**shared, "tokenizer and llguidance": spec.takes_masks})
        if processes is not None:  # two device groups have no host memory
            options = replace(options, host_memory=0, restore="on_admission")
            spec = replace(spec, options=options)
            models = [first := replace(first, spec=spec)]
    # The largest steps are compiled for the number of pages that would fit without temporaries. If
    # the same number fits with the measured temporaries, these executables are used. A page has one
    # id on all stages, so the stage with the least memory limits their number.
    optimistic = min(model.plan(step_bytes=0).num_pages for model in models)
    is_free = options.kv_memory is None and group is None
    if is_free and stages is None and spec.drafter is None:
        optimistic = steady(
            optimistic,
            first.wanted_pages,
            executable_store(),
            spec.graphdef,
            model_config,
            first.place.whole,
            options.page_size,
            options.kv_dtype,
            options.max_slots,
            options.max_context,
            *((spec.layer_windows,) if spec.layer_windows else ()),
        )
    optimistic = _agreed_number(optimistic, group)
    config = spec.config(num_pages=optimistic)
    programs = [model.programs(config) for model in models]
    # A requested size, or one that processes or stages agree on, depends on the largest step.
    # Requested kernels are tried now, so that unsuitable ones are refused.
    is_deferred = (
        is_free
        and stages is None
        and options.attention is None
        and leaves_room(programs[0].shelf.devices[0])
    )
    sizes = []
    for model, program, shapes in zip(models, programs, map(abstract, own), strict=True):
        step = StepBytes(partial(model.step_bytes, program, shapes, optimistic))
        size = model.plan(step_bytes=0 if is_deferred else step.measure())
        sizes.append(replace(size, step=step))
    # A stage without attention has no pages, and needs as many as can be used.
    size = min(sizes, key=lambda each: (each.num_pages, not each.page_bytes))
    num_pages = _agreed_number(min(size.num_pages, optimistic), group)
    size = replace(size, num_pages=num_pages)
    config = spec.config(
        num_pages=num_pages,
        **{
            name: _agreed_number(number, group)
            for name, number in _host_sizes(spec, models, num_pages, group).items()
        },
    )
    if num_pages != optimistic:
        programs = [model.programs(config) for model in models]
    with timed("cache"):
        caches = jax.block_until_ready(
            [
                model.new_cache(num_pages, program.shelf)
                for model, program in zip(models, programs, strict=True)
            ]
        )
    given: dict[str, Any] = dict(strict=options.strict, takes_masks=spec.takes_masks)
    if stages is not None:
        from jaxserve.execution.staged import StagedExecutor

        built = [
            DeviceStage(
                program,
                part_params,
                cache,
                config.num_host_pages,
                samples=model is models[-1],
                snapshots=model.new_snapshots(program.shelf),
                num_host_snapshots=config.num_host_snapshots,
            )
            for model, program, part_params, cache in zip(
                models, programs, own, caches, strict=True
            )
        ]
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        width, most = model_config.hidden_size, stages.micro_batches
        return StagedExecutor(config, built, parts, whole, width, most, **given), size
    snapshots = jax.block_until_ready(first.new_snapshots(programs[0].shelf))
    executor = DeviceExecutor(config, programs[0], own[0], caches[0], snapshots=snapshots, **given)
    if group is None:
        return executor, size
    from jaxserve.execution.processes import allocate_host, in_group

    if config.num_host_pages:
        allocate_host(executor.stages[0], group)
    return in_group(executor, group, processes, strict=options.strict), size


def _num_snapshots(model: PlacedModel) -> int:
    """Return the number of snapshots of states that are kept; 0 unless the policy keeps pages."""
    options = model.spec.options
    if not get_policy(options.policy).retention.keeps_pages:
        return 0
    return plan_snapshots(
        next(iter(model.place.whole.addressable_devices)),
        model.snapshot_bytes,
        model.spec.config(num_pages=MIN_PAGES).max_slots,
        options.state_memory,
    )


def _host_sizes(
    spec: ExecutorSpec, models: Sequence[PlacedModel], num_pages: int, group: ProcessGroup | None
) -> dict[str, int]:
    """Return the numbers of pages and of states on the host, as `ExecutorSpec.config` takes them.

    States are on the host, with pages, only if the policy keeps both there.
    """
    wanted = spec.options.host_memory
    shards = [_shards_on_this_host(each.place, group) for each in models]
    page_bytes = sum(each.page_bytes * num for each, num in zip(models, shards, strict=True))
    if not spec.model_config.num_recurrent_layers:
        return {"num_host_pages": plan_host_pages(page_bytes, num_pages - 1, wanted)}
    uses_host = get_policy(spec.options.policy).retention.uses_host
    pages, states = plan_host_states(
        page_bytes=page_bytes,
        state_bytes=sum(x.snapshot_bytes * num for x, num in zip(models, shards, strict=True)),
        num_device_pages=num_pages - 1,
        num_snapshots=spec.num_snapshots if uses_host else 0,
        wanted=wanted,
    )
    return {"num_host_pages": pages, "num_host_snapshots": states}


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
        min_pages=1 + config.page_layout.num_tables,
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


def _agreed_number(number: int, group: ProcessGroup | None) -> int:
    """Return the number of pages, or of snapshots, that fits on every process."""
    return number if group is None else min(group.all_gather(number))


def build_groups(
    spec: ExecutorSpec, places: Sequence[tuple[Any, StagePlan | None]]
) -> tuple[GroupedExecutor, PoolSize]:
    """Build and compile an executor of two device groups; return it with a pool size.

    The size is that of the pool with the largest pages. A page has one number in both groups, so
    the group with the least memory limits their number. `places` has, for the encode group and the
    decode group, parameters of the whole model and the stages to cut it into; the parameters of a
    group in one piece are on its devices. Raises what `build_executor` raises.
    """
    from jaxserve.execution.grouped import GroupedExecutor

    options = spec.options
    own = replace(options, warmup=False, host_memory=0)
    with ExitStack() as if_one_fails:
        built: list[tuple[ModelExecutor, PoolSize]] = []
        # Answers are computed by the decode group, which alone speculates.
        for (params, stages), speculation in zip(places, (None, own.speculation), strict=True):
            group_spec = replace(spec, options=replace(own, speculation=speculation))
            built.append(build_executor(group_spec, params, stages=stages, is_group=True))
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
