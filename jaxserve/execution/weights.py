"""Placement of parameters on an executor's devices, and checks of new parameters."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.config import check_fits
from sharding import placed, state_shardings

_ELEMENTS_LOOKED_AT = 256


def sharded(params: Any, mesh: Mesh, model_config: Any) -> Any:
    """Return `params` on `mesh` by the rules of `sharding`; arrays already there are not copied.

    Raises:
      InvalidConfigError: a dimension of a parameter is not divisible by its mesh axis.
    """
    check_fits(mesh, model_config)
    return placed(params, state_shardings(params, mesh))


def check_same(params: Any, expected: Any) -> None:
    """Raise InvalidConfigError if structure, shapes or dtypes of two states differ.

    The message names the first difference. Either state may be abstract.
    """
    new, now = (
        {path: v.get_value() for path, v in nnx.to_flat_state(tree)} for tree in (params, expected)
    )
    problems = [f"{'.'.join(map(str, path))} is missing" for path in now if path not in new]
    problems += [f"{'.'.join(map(str, path))} is unknown" for path in new if path not in now]
    problems += [
        f"{'.'.join(map(str, path))} is {new[path].dtype}{new[path].shape} instead of "
        f"{array.dtype}{array.shape}"
        for path, array in now.items()
        if path in new and (new[path].shape, new[path].dtype) != (array.shape, array.dtype)
    ]
    if problems:
        raise InvalidConfigError(
            f"the parameters do not fit this model: {problems[0]}"
            + (f", and {len(problems) - 1} more problems" if problems[1:] else "")
            + "; pass a state of the same structure, shapes and dtypes"
        )


def check_dtype(params: Any, dtype: str) -> None:
    """Raise InvalidConfigError unless parameters have the dtype of the model's configuration.

    Parameters with the metadata `has_own_dtype` (quantised values, scales) may have another.
    """
    for path, variable in nnx.to_flat_state(params):
        found = variable.get_value().dtype.name
        if found != dtype and not variable.get_metadata().get("has_own_dtype", False):
            raise InvalidConfigError(
                f"the parameter {'.'.join(map(str, path))} is {found}, and the model's "
                f"configuration says {dtype}; cast the parameters, or build the model from "
                f"dataclasses.replace(config, dtype={found!r})"
            )


def fingerprint(params: Any, *settings: Any) -> bytes:
    """Return a hash of weights and settings that is the same in every run.

    It reads a few elements of each parameter, evenly spread, since training changes all elements.
    """
    digest = blake2b(repr(settings).encode(), digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spread = np.linspace(0, leaf.size - 1, _ELEMENTS_LOOKED_AT).astype(np.int64)
        elements = np.asarray(leaf[np.unravel_index(spread, leaf.shape)] if leaf.shape else leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}".encode())
        digest.update(elements.tobytes())
    return digest.digest()


def fitted(params: Any, old: Any) -> Any:
    """Return `params` on the devices of `old`. Arrays already there are not copied.

    Raises:
      InvalidConfigError: structure, shapes or dtypes differ; see `check_same`.
    """
    check_same(params, old)
    new = dict(nnx.to_flat_state(params))
    return nnx.from_flat_state(
        [
            (path, old.replace(placed(new[path].get_value(), old.get_value().sharding)))
            for path, old in nnx.to_flat_state(old)
        ]
    )
