"""Folders whose weights Orbax has written are loaded like others."""

from __future__ import annotations

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxserve.core.errors import CheckpointError
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.families import config_from_hf
from jaxserve.models.loading import random_params
from jaxserve.models.orbax_folder import checkpoint_in
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.store import load_model
from jaxserve.sharding import make_mesh
from jaxserve.testing import tiny
from tests.common.tiers import some

EIGHT_BITS = Quantisation.of(RuntimeOptions(quantize="int8"))


@pytest.fixture
def state():
    return random_params(config_from_hf(tiny.CONFIG), 3)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    return tmp_path


def _write(folder, state, how: str):
    """Write the parameters as Orbax's users do; return the checkpoint's own folder."""
    if how == "manager":
        with ocp.CheckpointManager(folder) as manager:
            older = jax.tree.map(lambda x: x + 1, state)
            for step, params in ((9, older), (10, state)):
                save = ocp.args.StandardSave(params)
                manager.save(step, args=ocp.args.Composite(params=save, rest=save))
        return folder / "10" / "params"
    place = folder / "params"
    if how == "steps":
        with ocp.CheckpointManager(place) as manager:
            manager.save(3, args=ocp.args.StandardSave(state))
        return place / "3" / "default"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(place, nnx.to_pure_dict(state) if how == "arrays" else state)
    return place


@pytest.mark.parametrize("how", some(["state", "arrays", "steps", "manager"], 0, 3))
def test_every_form_is_found_and_read(folder, state, how):
    assert checkpoint_in(folder) is None
    assert checkpoint_in(_write(folder, state, how)) == checkpoint_in(folder)
    loaded = load_model(folder, progress=False).params
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(loaded), nnx.to_pure_dict(state))


@pytest.mark.release
def test_parameters_go_to_their_mesh_dtype_and_format(folder, state):
    _write(folder, state, "state")
    mesh = make_mesh(tensor=2)
    loaded = load_model(folder, dtype="bfloat16", mesh=mesh, progress=False).params
    leaves = jax.tree.leaves(loaded)
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)
    each = dict(quantisation=EIGHT_BITS, progress=False)
    drawn = load_model(folder, load="random", seed=3, **each).params
    jax.tree.map(np.testing.assert_array_equal, load_model(folder, **each).params, drawn)


def test_what_does_not_fit_is_listed(folder, state):
    del state["norm"]
    _write(folder, state | {"extra": nnx.Param(np.zeros(3))}, "state")
    with pytest.raises(CheckpointError) as raised:
        load_model(folder, progress=False)
    assert len(raised.value.problems) == 2
    assert "missing parameter norm" in str(raised.value)
    assert "surplus parameter extra (3,)" in str(raised.value)
