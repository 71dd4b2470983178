"""Executors of two device groups on other devices, made beside the executors that serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.core.config import EngineConfig
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.grouped import GroupedExecutor, Links, links_between
from jaxserve.execution.sizes import CachePlan, engine_config
from jaxserve.execution.warmup import executable_store
from jaxserve.models.decoder import LayerLayout
from jaxserve.steps.placement import Placement
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.probing import Probe
from jaxserve.steps.programs import Programs
from jaxserve.steps.step_function import StepFunction
from sharding import DeviceGroups, placed, state_shardings
from sharding.rules import replicated
from sharding.shards import TENSOR

# Bytes of weights, in whole arrays, after which a check follows.
_PIECE_BYTES = 64 << 20
# Bytes that are placed to learn how long it takes.
_TRIAL_BYTES = 16 << 20

# Raises if the work is to end; called again and again.
Check = Callable[[], None]


@final
@dataclass(frozen=True, kw_only=True)
class GroupMaker:
    """Makes executors of a model for other groups of devices; see `build_executor` for arguments.

    Each group is one mesh, without stages, and the model has no encoder.

    Attributes:
      takes_masks: whether requests may have grammars.
    """

    graphdef: nnx.GraphDef
    model_config: Any
    layer_layout: LayerLayout
    options: RuntimeOptions
    probe: Probe | None = None
    takes_masks: bool = False

    def weights_bytes(self, params: Any, mesh: Mesh) -> int:
        """Return the bytes of the parameters on each device of a mesh."""
        leaves = jax.tree.leaves(params)
        places = jax.tree.leaves(state_shardings(params, mesh))
        shards = (p.shard_shape(x.shape) for x, p in zip(leaves, places, strict=True))
        sizes = [jax.ShapeDtypeStruct(s, x.dtype) for x, s in zip(leaves, shards, strict=True)]
        return sum(each.size * each.dtype.itemsize for each in sizes)

    def page_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of a page on each device of a mesh."""
        return self._cache_plan(_place(mesh)).page_bytes

    def placing_s(self, params: Any, groups: DeviceGroups) -> float:
        """Return the seconds that placing the parameters on other groups is expected to take.

        An array of `_TRIAL_BYTES` and a small one are placed, which takes milliseconds. Devices may
        compute meanwhile.
        """
        leaves = jax.tree.leaves(params)
        present = leaves[0].sharding.mesh
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        total_s = 0.0
        for mesh in meshes_of(groups):
            if mesh == present:  # there they are
                continue
            few_s, many_s = (_trial_s(size, present, mesh) for size in (0, _TRIAL_BYTES))
            total_s += len(leaves) * few_s + num_bytes / _TRIAL_BYTES * max(0.0, many_s - few_s)
        return total_s

    def prepare(
        self, groups: DeviceGroups, params: Any, num_pages: int, check: Check
    ) -> PreparedGroups:
        """Make executors whose weights and caches come later, and their executables.

        The executables are made only if the runtime's options have a warm-up. Nothing large is
        allocated.

        Args:
          params: the present parameters, of which only shapes and dtypes are read.
          num_pages: pages of each group's pool.
        """
        config = engine_config(self.model_config, self.options, num_pages=num_pages)
        prepared = PreparedGroups(
            [self._prepared(mesh, params, config) for mesh in meshes_of(groups)]
        )
        if self.options.warmup:
            try:
                prepared.warm_up(check)
            except BaseException:
                prepared.close()
                raise
        return prepared

    def _prepared(self, mesh: Mesh, params: Any, config: EngineConfig) -> _Prepared:
        place = _place(mesh)
        shardings = state_shardings(params, mesh)
        programs = Programs.shared(
            *(self.graphdef, config, self.model_config, place, self.probe, executable_store())
        )
        plan = self._cache_plan(place)
        cache = jax.tree.map(partial(_shape, place.pages), plan.abstract(config.num_pages))
        executor = DeviceExecutor(
            config,
            programs,
            jax.tree.map(lambda x, sharding: _shape(sharding, x), params, shardings),
            cache,
            strict=self.options.strict,
            takes_masks=self.takes_masks,
        )
        return _Prepared(executor, shardings, plan.maker(config.num_pages, programs.shelf))

    def empty_caches(self, meshes: Sequence[Mesh], config: EngineConfig) -> list[Any]:
        """Return caches of zeros for executors of these meshes."""
        caches = []
        for mesh in meshes:
            place = _place(mesh)
            programs = Programs.shared(
                *(self.graphdef, config, self.model_config, place, self.probe, executable_store())
            )
            caches.append(self._cache_plan(place).new(config.num_pages, programs.shelf))
        return caches

    def _cache_plan(self, place: Placement) -> CachePlan:
        return CachePlan(self.model_config, self.options, self.layer_layout, place)


@final
@dataclass(frozen=True)
class _Prepared:
    """An executor that has shapes in place of weights and cache.

    Attributes:
      shardings: of its weights.
      new_cache: makes its cache.
    """

    executor: DeviceExecutor
    shardings: Any
    new_cache: StepFunction


@final
class PreparedGroups:
    """Executors of two groups without weights and caches, and the links between them."""

    def __init__(self, prepared: Sequence[_Prepared]):
        self._prepared = tuple(prepared)
        encode, decode = self.executors = tuple(each.executor for each in prepared)
        self.links: Links = links_between(encode, decode)

    def warm_up(self, check: Check) -> None:
        """Make every executable, on threads of their own."""
        steps: list[tuple[str, Callable[[], Any]]] = [
            step for each in self._prepared for step in each.executor.warmup_steps()
        ]
        steps += [("page cache", each.new_cache.prepare) for each in self._prepared]
        steps += [("handover", link.prepare) for link in self.links.values()]
        preparation = Preparation(steps)
        try:
            for _ in preparation.finished():
                check()
        finally:
            preparation.close()
        for each in self._prepared:
            each.executor.finish_warmup()

    def fill(self, params: Any, check: Check) -> None:
        """Place weights and make empty caches, on devices that have room for both.

        If it fails, the executors are as before.
        """
        weights = [_placed(params, each.shardings, check) for each in self._prepared]
        caches = []
        for each in self._prepared:
            caches.append(jax.block_until_ready(each.new_cache()))
            check()
        for each, own, cache in zip(self._prepared, weights, caches, strict=True):
            each.executor.update_params(own)
            each.executor.pages.replace(cache)
        for link in self.links.values():
            link.warm_up()

    def close(self) -> None:
        for each in self._prepared:
            each.executor.close()


def exchange(
    executor: GroupedExecutor, prepared: PreparedGroups, maker: GroupMaker, check: Check
) -> None:
    """Have an executor go on with prepared groups, whose caches are empty.

    The present caches are deleted before weights are placed, so that no device needs more memory
    than weights and cache. If it fails, the present groups go on with empty caches.

    Args:
      executor: its groups have a mesh each, no step in flight, and no sequence with pages.
    """
    params = params_of(executor)
    pools = [pool for group in executor.groups for pool in group.page_pools]
    for pool in pools:
        pool.drop()
    try:
        prepared.fill(params, check)
    except BaseException:
        meshes = [_mesh_of(pool.place) for pool in pools]
        for pool, cache in zip(pools, maker.empty_caches(meshes, executor.config), strict=True):
            pool.replace(cache)
        raise
    executor.exchange(prepared.executors, prepared.links)


def params_of(executor: GroupedExecutor) -> Any:
    """Return the present parameters of an executor whose encode group has no stages."""
    encode: Any = executor.groups[0]
    return encode.params


def _placed(params: Any, shardings: Any, check: Check) -> Any:
    """Return the parameters on other devices; arrays that are there already are not copied."""
    leaves, structure = jax.tree.flatten(params)
    new: list[jax.Array] = []
    num_bytes = 0
    for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        new.append(placed(leaf, sharding))
        num_bytes += leaf.nbytes
        if num_bytes >= _PIECE_BYTES:
            jax.block_until_ready(new)
            check()
            num_bytes = 0
    jax.block_until_ready(new)
    check()
    return jax.tree.unflatten(structure, new)


def _trial_s(num_bytes: int, source: Mesh, target: Mesh) -> float:
    """Return the seconds in which about so many bytes are placed on another mesh."""
    rows = num_bytes // 1024 + source.size * target.size
    rows -= rows % (source.size * target.size)
    spec = PartitionSpec(TENSOR)
    array = jax.device_put(np.zeros((rows, 256), np.float32), NamedSharding(source, spec))
    seconds = 0.0
    for _ in range(2):  # the first one may compile
        begin_s = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, NamedSharding(target, spec)))
        seconds = time.perf_counter() - begin_s
    return seconds


def _shape(sharding: jax.sharding.Sharding, leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _place(mesh: Mesh) -> Placement:
    return Placement.like(replicated(mesh))


def meshes_of(groups: DeviceGroups) -> list[Mesh]:
    """Return the meshes of groups without stages."""
    return [mesh for mesh in groups.both if isinstance(mesh, Mesh)]


def _mesh_of(place: jax.sharding.Sharding) -> Mesh:
    mesh: Any = Placement.like(place).mesh
    return mesh
