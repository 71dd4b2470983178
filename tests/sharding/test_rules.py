"""Logical axes become mesh axes by one table; what does not fit is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.sharding import (
    check_tensor_axis,
    make_mesh,
    named_sharding,
    partition_spec,
    state_shardings,
)


def test_fused_projection_is_split_by_kv_head():
    """A fused qkv weight is split over the tensor axis by KV head; stacked layers are not split."""
    axes = ("layers", "embed", "kv_heads", None, None)
    assert partition_spec(axes) == PartitionSpec(None, None, "tensor", None, None)


def test_unknown_and_repeated_axes_are_refused():
    """A name outside the table, or one mesh axis on two dimensions, raises an error."""
    with pytest.raises(ValueError, match=r"\['color'\] are unknown"):
        partition_spec(("color",))
    with pytest.raises(ValueError, match="one dimension only"):
        partition_spec(("vocab", "mlp"))


def test_names_must_fit_the_shape():
    """There must be as many names as dimensions."""
    with pytest.raises(ValueError, match="do not fit the shape"):
        named_sharding(make_mesh(), (4, 4), ("embed",))


def test_sizes_must_divide():
    """A dimension that its mesh axis does not divide raises an error with its name."""
    mesh = jax.sharding.AbstractMesh((1, 1, 2), ("data", "stage", "tensor"))
    with pytest.raises(ValueError, match="'mlp' of size 3 is not a multiple"):
        named_sharding(mesh, (8, 3), ("embed", "mlp"))


def test_few_kv_heads_and_odd_vocabularies_are_replicated():
    """Each shard holds a whole copy of a dimension that cannot be split evenly."""
    mesh = jax.sharding.AbstractMesh((1, 1, 2), ("data", "stage", "tensor"))
    assert named_sharding(mesh, (8, 3), ("embed", "kv_heads")).spec == PartitionSpec(None, None)
    assert named_sharding(mesh, (50257, 8), ("vocab", "embed")).spec == PartitionSpec(None, None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mlp", "allowed"),
    [(6, 2, 80, "[1, 2]"), (32, 8, 64, "[1, 2, 4, 8, 16, 32]"), (12, 12, 10, "[1, 2]")],
)
def test_a_tensor_axis_must_fit_the_heads(heads, kv_heads, mlp, allowed):
    """The error lists the sizes that fit."""
    mesh = jax.sharding.AbstractMesh((1, 1, 5), ("data", "stage", "tensor"))
    with pytest.raises(ValueError, match=re.escape(f"use one of {allowed}")):
        check_tensor_axis(mesh, num_heads=heads, num_kv_heads=kv_heads, num_mlp_parts=mlp)


def test_state_follows_its_metadata():
    """Each parameter is placed by its logical axes; one without them is replicated."""

    class Model(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros((4, 6)), logical_axes=("embed", "mlp"))
            self.scale = nnx.Param(jnp.zeros(4))

    state = nnx.state(nnx.eval_shape(Model))
    placed = state_shardings(state, make_mesh())
    assert placed["weight"].get_value().spec == PartitionSpec(None, "tensor")
    assert placed["scale"].get_value().spec == PartitionSpec(None)


@pytest.mark.parametrize("sizes", [dict(data=0), dict(tensor=-1), dict(stage=1.5)])
def test_mesh_sizes_are_validated(sizes):
    """Sizes below one, or not whole, are refused."""
    with pytest.raises(ValueError, match="pass a whole number"):
        make_mesh(**sizes)


def test_mesh_larger_than_the_machine_is_refused():
    """More devices than there are is an error that says how many there are."""
    with pytest.raises(ValueError, match="needs 4096 devices"):
        make_mesh(tensor=4096)
