"""Moves of two device groups to other devices: the weights, and executors there."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, cast, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineFailedError
from jaxserve.execution.build import ExecutorSpec, PlacedModel
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.grouped import GroupedExecutor
from jaxserve.execution.transport import LocalTransport
from jaxserve.models.config import check_fits
from jaxserve.sharding import DeviceGroups, make_groups, placed, state_shardings
from jaxserve.sharding.rules import replicated
from jaxserve.sharding.shards import TENSOR
from jaxserve.steps.preparation import Preparation
from jaxserve.steps.step_function import Placement, StepFunction, abstract

# Called repeatedly; raises if the work must end.
Check = Callable[[], None]
# Arrays of two groups, as (group, index).
Leaves = frozenset[tuple[int, int]]

# Bytes of the array whose placing is timed.
_TRIAL_BYTES = 16 << 20


@final
class MovingWeights:
    """The weights of both device groups while they move to other devices.

    Both groups have the same arrays, each with its own shards. An array is freed on its previous
    devices as soon as it is placed, so no other reference to it may exist. Arrays that the caller
    shares are never freed, and are kept to be put back.
    """

    def __init__(self, params: Sequence[Any], shared: Leaves = frozenset()):
        flat = [jax.tree.flatten(each) for each in params]
        self._leaves: list[list[jax.Array]] = [leaves for leaves, _ in flat]
        self._structures = [structure for _, structure in flat]
        self._former = [[leaf.sharding for leaf in leaves] for leaves in self._leaves]
        self._kept = {(group, index): self._leaves[group][index] for group, index in shared}

    @property
    def params(self) -> list[Any]:
        pairs = zip(self._structures, self._leaves, strict=True)
        return [jax.tree.unflatten(structure, leaves) for structure, leaves in pairs]

    def place(self, shardings: Sequence[Sequence[Sharding]], check: Check) -> None:
        """Move every array to its place in `shardings`, one by one, and call `check` after each.

        Arrays that are in place are not copied. If it fails, some arrays have moved and the rest
        have not.
        """
        for index in range(len(self._leaves[0])):
            self._place(index, shardings)
            check()

    def put_back(self, check: Check) -> None:
        """Move every array back, in reverse order, so that the peak memory is that of `place`."""
        for index in reversed(range(len(self._leaves[0]))):
            self._place(index, self._former)
            check()

    def _place(self, index: int, shardings: Sequence[Sequence[Sharding]]) -> None:
        new = [self._placed(group, index, own[index]) for group, own in enumerate(shardings)]
        jax.block_until_ready(new)
        for leaves, leaf in zip(self._leaves, new, strict=True):
            leaves[index] = leaf

    def _placed(self, group: int, index: int, sharding: Sharding) -> jax.Array:
        for leaf in (self._leaves[group][index], self._kept.get((group, index))):
            if leaf is not None and leaf.sharding == sharding:
                return leaf
        return placed(self._leaves[0][index], sharding)


@final
@dataclass(frozen=True)
class WeightsMemory:
    """Bytes of weights on the devices of two groups, during and after a move.

    Attributes:
      most_bytes: peak on a device, while an array is on both its previous and its new devices.
      group_bytes: bytes on the fullest device of each group after the move.
    """

    most_bytes: int
    group_bytes: tuple[int, ...]


def weights_memory(
    params: Sequence[Any], shardings: Sequence[Sequence[Sharding]], shared: Leaves = frozenset()
) -> WeightsMemory:
    """Return the memory for moving the present parameters; arrays that the caller shares stay."""
    groups = [jax.tree.leaves(each) for each in params]
    held: Counter[Any] = Counter()

    @cache
    def shard_bytes(shape: tuple[int, ...], itemsize: int, sharding: Sharding) -> int:
        return prod(sharding.shard_shape(shape)) * itemsize

    @cache
    def devices(sharding: Sharding) -> tuple[Any, ...]:
        return tuple(sharding.device_set)

    def count(leaf: jax.Array, sharding: Sharding, sign: int = 1) -> None:
        for device in devices(sharding):
            held[device] += sign * shard_bytes(leaf.shape, leaf.dtype.itemsize, sharding)

    for leaves in groups:
        for leaf in leaves:
            count(leaf, leaf.sharding)
    most = max(held.values())
    for index in range(len(groups[0])):
        moving = [
            (group, leaves[index], own[index])
            for group, (leaves, own) in enumerate(zip(groups, shardings, strict=True))
            if leaves[index].sharding != own[index]
        ]
        for _, leaf, sharding in moving:
            count(leaf, sharding)
        most = max(most, *held.values())
        for group, leaf, _ in moving:
            if (group, index) not in shared:
                count(leaf, leaf.sharding, -1)
    after = (max(held[device] for device in devices(own[0])) for own in shardings)
    return WeightsMemory(most, tuple(after))


def shared_leaves(params: Sequence[Any]) -> Leaves:
    """Return the arrays of two groups that share memory with other live arrays of this process.

    For instance, these are the arrays of a model that the caller gave to the runtime. Their memory
    is not freed when the runtime drops its references.
    """
    leaves = {
        (group, index): leaf
        for group, each in enumerate(params)
        for index, leaf in enumerate(jax.tree.leaves(each))
    }
    own = {id(part) for leaf in leaves.values() for part in (leaf, *_parts(leaf))}
    kinds = {(leaf.shape, leaf.dtype) for leaf in leaves.values()}
    others: set[tuple[int, int]] = set()
    for array in jax.live_arrays():
        if (array.shape, array.dtype) in kinds and id(array) not in own:
            others |= _addresses(array)
    return frozenset(at for at, leaf in leaves.items() if not others.isdisjoint(_addresses(leaf)))


def _parts(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _addresses(array: jax.Array) -> set[tuple[int, int]]:
    """Return device and address of each shard; none for an array that was donated."""
    try:
        parts = _parts(array)
        return {(next(iter(part.devices())).id, part.unsafe_buffer_pointer()) for part in parts}
    except RuntimeError:
        return set()


@final
@dataclass(frozen=True)
class GroupMaker:
    """Makes executors of a model without encoder on groups of one mesh each, without stages."""

    spec: ExecutorSpec

    def check_fits(self, params: Any, mesh: Mesh) -> None:
        """Raise ValueError if the model cannot be divided over a mesh."""
        check_fits(mesh, self.spec.model_config)
        state_shardings(params, mesh)

    def moved_bytes(
        self, params: Sequence[Any], groups: DeviceGroups, shared: Leaves
    ) -> WeightsMemory:
        """Return the bytes of weights during and after a move; `shared` arrays stay in memory."""
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
                except ValueError:  # the model cannot be divided this way
                    continue
                found[encode, decode] = groups
        return found

    def step_bytes(self, params: Any, groups: DeviceGroups, num_pages: int) -> list[int]:
        """Compile each group's largest step, and return the bytes of its temporaries.

        The engine may serve meanwhile. Only shapes and dtypes of `params` are read.
        """
        return [
            model.step_bytes(
                model.programs(config),
                _shapes(params, state_shardings(params, mesh)),
                num_pages,
            )
            for mesh, config in zip(meshes_of(groups), self._configs(num_pages), strict=True)
            for model in [self._model(mesh)]
        ]

    def page_bytes(self, mesh: Mesh) -> int:
        return self._model(mesh).page_bytes

    def placing_s(self, params: Any, groups: DeviceGroups) -> float:
        """Return the seconds that placing the parameters on other groups is expected to take.

        It times the placing of an array of `_TRIAL_BYTES` and of a small one: milliseconds.
        """
        leaves = jax.tree.leaves(params)
        present = leaves[0].sharding.mesh
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        total_s = 0.0
        for mesh in meshes_of(groups):
            if mesh == present:  # already there
                continue
            few_s, many_s = (_trial_s(size, present, mesh) for size in (0, _TRIAL_BYTES))
            total_s += len(leaves) * few_s + num_bytes / _TRIAL_BYTES * max(0.0, many_s - few_s)
        return total_s

    def prepare(
        self, groups: DeviceGroups, params: Any, num_pages: int, check: Check
    ) -> PreparedGroups:
        """Make executors without weights and caches, and compile if the options have a warm-up."""
        prepared = PreparedGroups(
            [
                self._prepared(mesh, params, config)
                for mesh, config in zip(meshes_of(groups), self._configs(num_pages), strict=True)
            ]
        )
        if self.spec.options.warmup:
            try:
                prepared.warm_up(check)
            except BaseException:
                prepared.close()
                raise
        return prepared

    def _prepared(self, mesh: Mesh, params: Any, config: EngineConfig) -> _Prepared:
        model, shardings = self._model(mesh), state_shardings(params, mesh)
        programs = model.programs(config)
        cache = model.abstract_cache(config.num_pages)
        executor = DeviceExecutor(
            config,
            programs,
            _shapes(params, shardings),
            _shapes(cache, model.place.cache(model.model_config)),
            strict=self.spec.options.strict,
            takes_masks=self.spec.takes_masks,
        )
        return _Prepared(executor, shardings, model.cache_maker(config.num_pages, programs.shelf))

    def empty_cache(self, mesh: Mesh, config: EngineConfig) -> Any:
        model = self._model(mesh)
        return model.new_cache(config.num_pages, model.programs(config).shelf)

    def _configs(self, num_pages: int) -> tuple[EngineConfig, EngineConfig]:
        decode = self.spec.config(num_pages=num_pages)
        return decode.without_proposals(), decode

    def _model(self, mesh: Mesh) -> PlacedModel:
        return PlacedModel(self.spec, Placement.like(replicated(mesh)))


@final
@dataclass(frozen=True)
class _Prepared:
    """An executor with shapes instead of weights and cache, and the functions that fill it."""

    executor: DeviceExecutor
    shardings: Any
    new_cache: StepFunction


@final
class PreparedGroups:
    """Executors of two groups without weights and caches, and the transport between them."""

    def __init__(self, prepared: Sequence[_Prepared]):
        self._prepared = tuple(prepared)
        encode, decode = self.executors = tuple(each.executor for each in prepared)
        self.transport = LocalTransport(encode.page_pools, decode.page_pools)

    def warm_up(self, check: Check) -> None:
        """Compile every executable, on several threads."""
        steps: list[tuple[str, Callable[[], Any]]] = [
            step for each in self._prepared for step in each.executor.warmup_steps()
        ]
        steps += [("page cache", each.new_cache.prepare) for each in self._prepared]
        steps.append(("handover", self.transport.prepare))
        preparation = Preparation(steps)
        try:
            for _ in preparation.finished():
                check()
        finally:
            preparation.close()
        for each in self._prepared:
            each.executor.finish_warmup()

    def fill(self, weights: MovingWeights, check: Check) -> None:
        """Place weights, then make empty caches."""
        weights.place([jax.tree.leaves(each.shardings) for each in self._prepared], check)
        for executor, params in zip(self.executors, weights.params, strict=True):
            executor.update_params(params)
        for each in self._prepared:
            each.executor.pages.replace(jax.block_until_ready(each.new_cache()))
            check()
        self.transport.warm_up()

    def release(self) -> None:
        for executor in self.executors:
            _release(executor)

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
    """Replace an executor's groups by prepared ones, whose caches are empty.

    The present caches are deleted before weights are placed, and new ones are made after that, so
    that a device needs memory for `GroupMaker.moved_bytes`, and later for weights and cache. On a
    failure the weights are put back, and the present groups continue with empty caches.

    Args:
      executor: its groups have a mesh each, no step in flight, and no sequence with pages.
      shared: the result of `shared_leaves`.

    Raises:
      EngineFailedError: the weights could not be put back; the executor cannot continue.
    """
    groups = _groups_of(executor)
    weights = MovingWeights(executor.params, shared)
    for group in groups:
        _release(group)
    try:
        prepared.fill(weights, check)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # frames may hold arrays
        try:
            prepared.release()
            _put_back(groups, weights, maker)
        except BaseException as second:
            raise EngineFailedError(
                f"devices could not move to another group ({type(error).__name__}: {error}), and "
                f"the weights could not be put back ({type(second).__name__}: {second}); this "
                "runtime serves no more: close it, and create a new one"
            ) from second
        del weights  # a caller may keep the error, and with it this frame
        raise
    executor.exchange(prepared.executors, prepared.transport)


def _put_back(groups: Sequence[DeviceExecutor], weights: MovingWeights, maker: GroupMaker) -> None:
    weights.put_back(check=lambda: None)
    for group, params in zip(groups, weights.params, strict=True):
        group.update_params(params)
        cache = maker.empty_cache(_mesh_of(group.pages.place), group.config)
        group.pages.replace(jax.block_until_ready(cache))


def _groups_of(executor: GroupedExecutor) -> list[DeviceExecutor]:
    return [cast(DeviceExecutor, group) for group in executor.groups]


def _release(executor: DeviceExecutor) -> None:
    """Free weights and cache; the executor keeps their shapes."""
    executor.pages.drop()
    executor.update_params(abstract(executor.params))


def _trial_s(num_bytes: int, source: Mesh, target: Mesh) -> float:
    """Return the seconds to place about `num_bytes` on another mesh."""
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


def _shapes(tree: Any, shardings: Any) -> Any:
    """Return the shapes of a tree's arrays; `shardings` is a prefix of it."""

    def placed(sharding: jax.sharding.Sharding, part: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
        )

    return jax.tree.map(placed, shardings, tree)


def meshes_of(groups: DeviceGroups) -> list[Mesh]:
    return [mesh for mesh in groups.both if isinstance(mesh, Mesh)]


def _mesh_of(place: jax.sharding.Sharding) -> Mesh:
    mesh: Any = Placement.like(place).mesh
    return mesh
