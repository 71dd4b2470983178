"""From a Flax model to a warmed-up engine: sizes, memory, executables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxserve.core.assets import cache_folder
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.device_executor import DeviceExecutor
from jaxserve.engine.memory_plan import PoolSize, plan_pool, plan_resize
from jaxserve.engine.placement import Placement
from jaxserve.engine.programs import Programs
from jaxserve.memory.page_pool import MIN_PAGES
from jaxserve.models.batch import empty_cache
from jaxserve.models.config import check_fits
from jaxserve.models.decoder import LayerLayout
from sharding import state_shardings


@final
@dataclass(frozen=True, kw_only=True)
class PlatformDefaults:
    """What to use where the user says nothing.

    Attributes:
      dtype: of parameters, activations and KV. bfloat16 is slower than float32 on CPUs in XLA.
      layer_layout: scanning over layers measured three times slower than unrolling on the CPU.
    """

    dtype: str
    layer_layout: str
    max_slots: int
    max_step_tokens: int
    max_decode_iterations: int


_CPU = PlatformDefaults(
    dtype="float32",
    layer_layout="unrolled",
    max_slots=32,
    max_step_tokens=256,
    max_decode_iterations=4,
)
_GPU = PlatformDefaults(
    dtype="bfloat16",
    layer_layout="scanned",
    max_slots=256,
    max_step_tokens=2048,
    max_decode_iterations=16,
)


def platform_defaults() -> PlatformDefaults:
    return _CPU if jax.default_backend() == "cpu" else _GPU


def enable_compilation_cache(folder: Path | None = None) -> None:
    """Keep every executable across processes, however fast it compiled.

    A folder that the user gave to JAX is left as it is.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder or cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def build_executor(
    graphdef: nnx.GraphDef,
    params: Any,
    model_config: Any,
    layer_layout: LayerLayout,
    options: RuntimeOptions,
) -> tuple[DeviceExecutor, PoolSize]:
    """Size the pool, create cache and slots beside the parameters, compile.

    Args:
      model_config: of the model: layers, KV heads, head_dim, max_position_embeddings.

    Raises:
      DeviceMemoryError, InvalidConfigError
    """
    # Committed to where they are, as parameters of an update will be: else those would compile.
    params = jax.tree.map(lambda x: jax.device_put(x, x.sharding), params)
    leaf = jax.tree.leaves(params)[0]
    place = Placement.like(leaf.sharding)
    if place.mesh is not None:
        check_fits(place.mesh, model_config)

    def new_cache(num_pages: int) -> Any:
        return empty_cache(
            model_config,
            num_pages,
            options.page_size,
            leaf.dtype,
            layer_layout,
            num_shards=place.num_shards,
        )

    draft = _engine_config(model_config, options, num_pages=MIN_PAGES)
    pages_a_sequence = draft.max_pages_per_sequence
    abstract = jax.eval_shape(lambda: new_cache(2))
    page_bytes = nbytes(abstract) // 2 // place.num_shards
    plan = partial(
        plan_pool,
        next(iter(place.whole.device_set)),
        page_bytes=page_bytes,
        wanted_pages=1 + draft.max_slots * pages_a_sequence,
        min_pages=MIN_PAGES,
        kv_bytes=None if options.kv_memory is None else parse_bytes(options.kv_memory),
    )
    # The largest steps are compiled for as many pages as fit without them: if those still fit,
    # what was compiled to be measured is what runs.
    optimistic = plan(step_bytes=0).num_pages
    draft = _engine_config(model_config, options, num_pages=optimistic)
    programs = Programs(graphdef, draft, place)
    abstract = jax.eval_shape(lambda: new_cache(optimistic))
    size = plan(step_bytes=programs.largest_step_bytes(params, abstract))
    if size.num_pages != optimistic:
        config = _engine_config(model_config, options, num_pages=size.num_pages)
        programs = Programs(graphdef, config, place)
    cache = jax.jit(new_cache, static_argnums=0, out_shardings=place.pages)(size.num_pages)
    executor = DeviceExecutor(programs, params, cache, strict=options.strict)
    if options.warmup:
        warm_up(executor, progress=options.progress)
    return executor, size


def resized(executor: DeviceExecutor, size: PoolSize, kv_bytes: int) -> PoolSize:
    """The size of the executor's pool, now `size`, if it had `kv_bytes`; see `plan_resize`.

    Raises:
      DeviceMemoryError
    """
    config = executor.config
    return plan_resize(
        next(iter(jax.tree.leaves(executor.params)[0].sharding.device_set)),
        size,
        kv_bytes,
        wanted_pages=1 + config.max_slots * config.max_pages_per_sequence,
        num_buffers=executor.num_buffers,
    )


def warm_up(executor: DeviceExecutor, *, progress: bool) -> None:
    """Compile every executable behind a progress bar."""
    steps = executor.warmup_steps()
    with tqdm(steps, desc="compiling", leave=False, delay=2, disable=not progress) as bar:
        for name, compile_step in bar:
            bar.set_postfix_str(name)
            compile_step()
    executor.finish_warmup()


def _engine_config(model_config: Any, options: RuntimeOptions, *, num_pages: int) -> EngineConfig:
    defaults = platform_defaults()
    max_slots = options.max_slots or defaults.max_slots
    max_step_tokens = options.max_step_tokens or max(defaults.max_step_tokens, max_slots)
    return EngineConfig(
        page_size=options.page_size,
        num_pages=num_pages,
        max_slots=max_slots,
        max_context=min(
            options.max_context or model_config.max_position_embeddings,
            model_config.max_position_embeddings,
        ),
        max_step_tokens=max_step_tokens,
        max_decode_iterations=options.max_decode_iterations or defaults.max_decode_iterations,
    )


def sharded(params: Any, mesh: Mesh, model_config: Any) -> Any:
    """`params` on `mesh`, by the rules of `sharding`; arrays that are there so are not copied.

    Raises:
      InvalidConfigError: the mesh does not divide them.
    """
    check_fits(mesh, model_config)
    return jax.device_put(params, state_shardings(params, mesh))


def fitted(params: Any, old: Any) -> Any:
    """`params` where `old` are; arrays that are there already are not copied.

    Raises:
      InvalidConfigError: they differ in structure, shape or dtype, naming the first that does.
    """
    new, now = (
        {path: v.get_value() for path, v in nnx.to_flat_state(tree)} for tree in (params, old)
    )
    problems = [f"{'.'.join(map(str, path))} is missing" for path in now if path not in new]
    problems += [f"{'.'.join(map(str, path))} is unknown" for path in new if path not in now]
    problems += [
        f"{'.'.join(map(str, path))} is {new[path].dtype}{new[path].shape} in place of "
        f"{array.dtype}{array.shape}"
        for path, array in now.items()
        if path in new and (new[path].shape, new[path].dtype) != (array.shape, array.dtype)
    ]
    if problems:
        raise InvalidConfigError(
            f"the parameters are not this model's: {problems[0]}"
            + (f", and {len(problems) - 1} more such" if problems[1:] else "")
            + "; give a state of the same structure, shapes and dtypes"
        )
    return nnx.from_flat_state(
        [
            (path, variable.replace(jax.device_put(new[path], now[path].sharding)))
            for path, variable in nnx.to_flat_state(old)
        ]
    )


def nbytes(tree: Any) -> int:
    """Bytes of every array in a pytree."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
