"""Weights that move between device groups: equal values, and the memory that was foretold."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.regroup import MovingWeights, shared_leaves, weights_memory
from jaxserve.sharding import make_groups, placed
from jaxserve.sharding.shards import TENSOR

# Found nowhere else, so that live arrays of the tests can be told from others.
_ROWS = 12
_WIDTHS = (1009, 2011, 4003, 1013, 6007)
DIVISIONS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1)]


def _meshes(encode: int, decode: int) -> list[Mesh]:
    groups = make_groups(encode=encode, decode=decode, devices=jax.devices()[:4])
    return [mesh for mesh in groups.both if isinstance(mesh, Mesh)]


def _shardings(division: tuple[int, int]) -> list[list[NamedSharding]]:
    """Return a place for every array of each group; the first one is not cut."""
    return [
        [NamedSharding(mesh, PartitionSpec(*([TENSOR] if i else []))) for i in range(len(_WIDTHS))]
        for mesh in _meshes(*division)
    ]


def _values() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.random((_ROWS, width), np.float32) for width in _WIDTHS]


def _params(division: tuple[int, int]) -> list[Any]:
    return [
        {str(i): placed(value, own[i]) for i, value in enumerate(_values())}
        for own in _shardings(division)
    ]


def _held() -> Counter[int]:
    """Return the bytes of the tests' arrays on each device, by its id."""
    found = {}
    for array in jax.live_arrays():
        if array.ndim == 2 and array.shape[1] in _WIDTHS:
            for shard in array.addressable_shards:
                found[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    total: Counter[int] = Counter()
    for (device, _), num_bytes in found.items():
        total[device] += num_bytes
    return total


def _check_equal(moving: MovingWeights, division: tuple[int, int]) -> None:
    for params, shardings in zip(moving.params, _shardings(division), strict=True):
        for i, value in enumerate(_values()):
            assert params[str(i)].sharding == shardings[i]
            np.testing.assert_array_equal(params[str(i)], value)


class _Watch:
    """A check that notes the most bytes on each device, and fails once.

    Args:
      fails_at: its call that raises, counted from 1.
    """

    def __init__(self, fails_at: int):
        self.most = _held()
        self.num_calls = 0
        self._fails_at = fails_at

    def __call__(self) -> None:
        self.most |= _held()
        self.num_calls += 1
        if self.num_calls == self._fails_at:
            raise InterruptedError


@pytest.mark.parametrize("seed", range(6))
def test_a_device_never_holds_more_than_was_foretold(seed: int):
    """Between random divisions; and back again after a failure in the middle."""
    rng = random.Random(seed)
    before, after = rng.sample(DIVISIONS, 2)
    params = _params(before)
    memory = weights_memory(params, _shardings(after))
    moving = MovingWeights(params)
    del params
    watch = _Watch(fails_at=rng.randrange(2 * len(_WIDTHS)))
    try:
        moving.place(_shardings(after), watch)
    except InterruptedError:
        moving.put_back(watch)
        _check_equal(moving, before)
    else:
        _check_equal(moving, after)
        held = _held()
        for mesh, num_bytes in zip(_meshes(*after), memory.group_bytes, strict=True):
            assert {held[device.id] for device in mesh.devices.flat} == {num_bytes}
        # The array that was just placed has been freed where it was.
        largest = 4 * _ROWS * max(_WIDTHS)
        assert memory.most_bytes <= max(watch.most.values()) + largest
    assert max(watch.most.values()) <= memory.most_bytes


def test_shared_arrays_stay_and_are_put_back():
    """Arrays that the caller has, too, are found, counted, and never copied back."""
    own = [jax.device_put(value, jax.devices()[0]) for value in _values()]
    encode, decode = _shardings((1, 1))
    params = [
        {str(i): placed(value, encode[i]) for i, value in enumerate(own)},
        {str(i): placed(value, decode[i]) for i, value in enumerate(own)},
    ]
    shared = shared_leaves(params)
    assert shared == {(0, i) for i in range(len(own))}
    memory = weights_memory(params, _shardings((2, 1)), shared)
    num_bytes = sum(each.nbytes for each in own)
    assert memory.group_bytes[0] > 1.4 * num_bytes == 1.4 * memory.group_bytes[1]
    moving = MovingWeights(params, shared)
    moving.place(_shardings((2, 1)), check=lambda: None)
    moving.put_back(check=lambda: None)
    assert all(moving.params[0][str(i)] is params[0][str(i)] for i in range(len(own)))
    del own, moving
    assert not shared_leaves(params)


@pytest.mark.parametrize("division", [(1, 2), (2, 1)])
def test_arrays_in_place_are_not_shared(division: tuple[int, int]):
    """Parts of an array that were looked at count as its own."""
    params = _params(division)
    for each in jax.tree.leaves(params):
        assert each.addressable_shards
    assert not shared_leaves(params)
