"""Executors of two device groups on other devices, made beside the executors that serve."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineFailedError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.grouped import GroupedExecutor, Links, links_between
from jaxserve.execution.sizes import CachePlan, engine_config
from jaxserve.execution.warmup import executable_store
from jaxserve.execution.weight_moves import (
    Check,
    Leaves,
    MovingWeights,
    WeightsMemory,
    weights_memory,
)
from jaxserve.models.config import check_fits
from jaxserve.models.decoder import LayerLayout
from jaxserve.steps.placement import Placement
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.probing import Probe
from jaxserve.steps.programs import Programs
from jaxserve.steps.step_function import StepFunction, abstract
from sharding import DeviceGroups, make_groups, state_shardings
from sharding.rules import replicated
from sharding.shards import TENSOR

# Bytes that are placed to learn how long it takes.
_TRIAL_BYTES = 16 << 20


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

    def check_fits(self, params: Any, mesh: Mesh) -> None:
        """Raise ValueError if the model cannot be divided over a mesh."""
        check_fits(mesh, self.model_config)
        state_shardings(params, mesh)

    def moved_bytes(
        self, params: Sequence[Any], groups: DeviceGroups, shared: Leaves
    ) -> WeightsMemory:
        """Return the bytes of weights during and after a move to other groups.

        Args:
          params: the present parameters of each group.
          shared: see `shared_leaves`.
        """
        places = [state_shardings(params[0], mesh) for mesh in meshes_of(groups)]
        return weights_memory(params, list(map(jax.tree.leaves, places)), shared)

    def divisions(self, params: Any, devices: Sequence[Any]) -> dict[tuple[int, int], DeviceGroups]:
        """Return the groups that the model allows, by their numbers of devices."""
        found = {}
        for encode in range(1, len(devices)):
            for decode in range(1, len(devices) - encode + 1):
                groups = make_groups(encode=encode, decode=decode, devices=devices)
                try:
                    for mesh in meshes_of(groups):
                        self.check_fits(params, mesh)
                except ValueError:  # the model cannot be divided so
                    continue
                found[encode, decode] = groups
        return found

    def step_bytes(self, params: Any, groups: DeviceGroups, num_pages: int) -> list[int]:
        """Return the bytes that the largest step of each group needs beside its arguments.

        The executables of these steps are made, beside an engine that may serve.

        Args:
          params: the present parameters, of which only shapes and dtypes are read.
          num_pages: pages of each group's pool.
        """
        return [
            self._programs(mesh, config).step_bytes(
                _shapes(params, state_shardings(params, mesh)),
                self._cache_plan(_place(mesh)).abstract(num_pages),
            )
            for mesh, config in zip(meshes_of(groups), self._configs(num_pages), strict=True)
        ]

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
        prepared = PreparedGroups(
            [
                self._prepared(mesh, params, config)
                for mesh, config in zip(meshes_of(groups), self._configs(num_pages), strict=True)
            ]
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
        programs = self._programs(mesh, config)
        plan = self._cache_plan(place)
        cache = jax.tree.map(partial(_shape, place.pages), plan.abstract(config.num_pages))
        executor = DeviceExecutor(
            config,
            programs,
            _shapes(params, shardings),
            cache,
            strict=self.options.strict,
            takes_masks=self.takes_masks,
        )
        return _Prepared(executor, shardings, plan.maker(config.num_pages, programs.shelf))

    def empty_cache(self, mesh: Mesh, config: EngineConfig) -> Any:
        """Return a cache of zeros for an executor of this mesh."""
        shelf = self._programs(mesh, config).shelf
        return self._cache_plan(_place(mesh)).new(config.num_pages, shelf)

    def _configs(self, num_pages: int) -> tuple[EngineConfig, EngineConfig]:
        """Return the configurations of the encode group and of the decode group."""
        decode = engine_config(self.model_config, self.options, num_pages=num_pages)
        return decode.without_proposals(), decode

    def _programs(self, mesh: Mesh, config: EngineConfig) -> Programs:
        place = _place(mesh)
        return Programs.shared(
            *(self.graphdef, config, self.model_config, place, self.probe, executable_store())
        )

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

    def fill(self, weights: MovingWeights, check: Check) -> None:
        """Place weights, and make empty caches when none is left where it was."""
        weights.place([jax.tree.leaves(each.shardings) for each in self._prepared], check)
        for executor, params in zip(self.executors, weights.params, strict=True):
            executor.update_params(params)
        for each in self._prepared:
            each.executor.pages.replace(jax.block_until_ready(each.new_cache()))
            check()
        for link in self.links.values():
            link.warm_up()

    def empty(self) -> None:
        """Let go of weights and caches, as far as there are any."""
        for executor in self.executors:
            _give_up(executor)

    def close(self) -> None:
        for each in self._prepared:
            each.executor.close()


def exchange(
    executor: GroupedExecutor,
    prepared: PreparedGroups,
    maker: GroupMaker,
    shared: Leaves,
    check: Check,
) -> None:
    """Have an executor go on with prepared groups, whose caches are empty.

    The present caches are deleted before weights are placed, and new ones are made after that. So
    a device needs memory for `GroupMaker.moved_bytes`, and later for weights and cache. If it
    fails, the weights are put back, and the present groups go on with empty caches.

    Args:
      executor: its groups have a mesh each, no step in flight, and no sequence with pages.
      shared: see `shared_leaves`.

    Raises:
      EngineFailedError: the weights could not be put back; the executor cannot go on.
    """
    groups = _groups_of(executor)
    weights = MovingWeights(executor.params, shared)
    for group in groups:
        _give_up(group)
    try:
        prepared.fill(weights, check)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they may hold arrays
        try:
            prepared.empty()
            _put_back(groups, weights, maker)
        except BaseException as second:
            raise EngineFailedError(
                f"devices could not move to another group ({type(error).__name__}: {error}), and "
                f"the weights could not be put back ({type(second).__name__}: {second}); this "
                "runtime serves no more: close it, and create a new one"
            ) from second
        del weights  # a caller may keep the error, and with it this frame
        raise
    executor.exchange(prepared.executors, prepared.links)


def _put_back(groups: Sequence[DeviceExecutor], weights: MovingWeights, maker: GroupMaker) -> None:
    """Place weights where they were, and make empty caches."""
    weights.put_back(check=lambda: None)
    for group, params in zip(groups, weights.params, strict=True):
        group.update_params(params)
        cache = maker.empty_cache(_mesh_of(group.pages.place), group.config)
        group.pages.replace(jax.block_until_ready(cache))


def _groups_of(executor: GroupedExecutor) -> list[DeviceExecutor]:
    return [cast(DeviceExecutor, group) for group in executor.groups]


def _give_up(executor: DeviceExecutor) -> None:
    """Let go of weights and cache; the executor has their shapes instead."""
    executor.pages.drop()
    executor.update_params(abstract(executor.params))


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


def _shapes(params: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, sharding: _shape(sharding, leaf), params, shardings)


def _place(mesh: Mesh) -> Placement:
    return Placement.like(replicated(mesh))


def meshes_of(groups: DeviceGroups) -> list[Mesh]:
    """Return the meshes of groups without stages."""
    return [mesh for mesh in groups.both if isinstance(mesh, Mesh)]


def _mesh_of(place: jax.sharding.Sharding) -> Mesh:
    mesh: Any = Placement.like(place).mesh
    return mesh
