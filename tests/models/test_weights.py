"""The notation for checkpoint tensors: a shard of a parameter is that part of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.weights import Tensor, Weight, gate_and_up, split_qkv

pytestmark = pytest.mark.fast

LAYER = 3
GROUP = 2
# Sizes of a parameter by the names of its axes.
SIZES = {"e": 6, "k": 4, "x": GROUP + 2, "d": 4, "u": 2, "m": 5, "n": 3}
WEIGHTS = {
    "as it is": Weight.of("w", "e m"),
    "transposed": Weight.of("w", "e m", "m e"),
    "heads in": Weight.of("w", "k x d e", "e (k x d)"),
    "sections": Weight.of("w", "e k x d", "e (x k d)"),
    "split": split_qkv("layers.{layer}.", "weight", GROUP),
    "split biases": split_qkv("layers.{layer}.", "bias", GROUP),
    "split and reordered": split_qkv("layers.{layer}.", "weight", GROUP, order={"d": [2, 0, 1, 3]}),
    "gated": gate_and_up("gate", "up", "weight"),
    "experts": Weight(
        "n e u m", tuple(Tensor(f"{n}.{u}", "m e", n=n, u=u) for n in range(3) for u in range(2))
    ),
}


class _Arrays:
    """A `WeightSource` of random tensors that records how much of each was read."""

    where = "memory"

    def __init__(self, shapes):
        random = np.random.default_rng(0)
        self.arrays = {name: random.standard_normal(shape) for name, shape in shapes}
        self.num_read = 0

    def shapes(self):
        return {name: array.shape for name, array in self.arrays.items()}

    def dtypes(self):
        return {name: str(array.dtype) for name, array in self.arrays.items()}

    def read(self, name, index=None):
        part = self.arrays[name][index or ()]
        self.num_read += part.size
        return part


def _whole(weight, source, shape):
    out = np.full(shape, np.nan)
    weight.read_into(out, source, shape, [slice(None)] * len(shape), layer=LAYER)
    return out


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(WEIGHTS)))
def test_a_shard_is_that_part_of_the_whole(data, name):
    """Any range of every axis can be read, and every element is filled."""
    weight = WEIGHTS[name]
    shape = [SIZES[axis] for axis in weight.axes.split()]
    source = _Arrays(weight.needed(shape, layer=LAYER))
    index = []
    for size in shape:
        first = data.draw(st.integers(0, size - 1))
        index.append(slice(first, data.draw(st.integers(first + 1, size))))
    whole = _whole(weight, source, shape)
    assert np.isfinite(whole).all()
    out = np.full([part.stop - part.start for part in index], np.nan)
    weight.read_into(out, source, shape, index, layer=LAYER)
    np.testing.assert_array_equal(out, whole[tuple(index)])


def test_heads_are_where_they_belong():
    """A fused projection holds each KV head's queries, key and value in the tensors' order."""
    shape = [SIZES[axis] for axis in "ekxd"]
    source = _Arrays(WEIGHTS["split"].needed(shape, layer=LAYER))
    whole = _whole(WEIGHTS["split"], source, shape)
    q, k, v = (source.arrays[f"layers.{LAYER}.{letter}_proj.weight"] for letter in "qkv")
    head, column = 2, 3
    first_query = (head * GROUP + 1) * SIZES["d"]
    np.testing.assert_array_equal(whole[:, head, 1, column], q[first_query + column])
    np.testing.assert_array_equal(whole[:, head, GROUP, column], k[head * SIZES["d"] + column])
    np.testing.assert_array_equal(whole[:, head, GROUP + 1, column], v[head * SIZES["d"] + column])


@pytest.mark.parametrize("name", ["split", "heads in"])
def test_a_shard_of_heads_reads_no_others(name):
    """A shard of a projection over KV heads reads only its share of the tensors."""
    weight = WEIGHTS[name]
    axes = weight.axes.split()
    shape = [SIZES[axis] for axis in axes]
    source = _Arrays(weight.needed(shape, layer=LAYER))
    index = [slice(1, 2) if axis == "k" else slice(None) for axis in axes]
    out = np.empty([1 if axis == "k" else SIZES[axis] for axis in axes])
    weight.read_into(out, source, shape, index, layer=LAYER)
    assert source.num_read == out.size
