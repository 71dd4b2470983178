"""The fingerprint of weights, by which pages on disk and exported KV are found again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.weights import fingerprint
from tests.common.tiers import some


def _state(array: Any) -> nnx.State:
    return nnx.State({"w": nnx.Param(jnp.asarray(array))})


@pytest.mark.parametrize(
    "dtype", some(["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "bool"], 0, 1)
)
def test_every_element_counts(dtype: str):
    """A change of any one element changes it, and so does an exchange of two elements.

    Until 2026-11 it read 256 elements of an array, so that another row of an embedding kept the
    pages of the former one.
    """
    array = np.zeros((7, 9, 2), jnp.dtype(dtype))
    found = {fingerprint(_state(array))}
    for place in np.ndindex(*array.shape):
        changed = array.copy()
        changed[place] = 1
        found.add(fingerprint(_state(changed)))
    assert len(found) == 1 + array.size


def test_every_bit_counts():
    """A negative zero, the smallest number, and the payload of a NaN are not the zero."""
    bits = [0, 1, 2**31, 0x7FC00000, 0x7FC00001, 2**31 + 1]
    states = [_state(np.full((3,), each, np.uint32).view(np.float32)) for each in bits]
    assert len({fingerprint(state) for state in states}) == len(bits)


def test_weights_of_other_structure_differ():
    """Shape, dtype, path and settings count, beside equal bytes; settings without a name, too."""
    zeros = np.zeros((4, 6), np.float32)
    named = nnx.State({"v": nnx.Param(jnp.asarray(zeros))})
    found = [
        fingerprint(_state(zeros)),
        fingerprint(_state(zeros.T)),
        fingerprint(_state(zeros.view(np.int32))),
        fingerprint(named),
        fingerprint(_state(zeros), 1.0),
        fingerprint(_state(zeros), 2.0),
        fingerprint(_state(zeros), object()),
    ]
    assert len(set(found)) == len(found)


def test_it_is_the_same_on_every_mesh():
    """Integer sums do not depend on which device has which part; they are computed in place."""
    array = np.random.default_rng(0).standard_normal((4, 6, 2), np.float32)
    wanted = fingerprint(_state(array))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    for spec in (PartitionSpec("tensor"), PartitionSpec(None, "tensor"), PartitionSpec()):
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        assert fingerprint(_state(placed)) == wanted
    assert fingerprint(_state(array)) == wanted
