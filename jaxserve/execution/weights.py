"""Placement of parameters on an executor's devices, and checks of new parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError, InvalidParamsError
from jaxserve.models.adapters import without_adapters
from jaxserve.models.config import check_fits
from jaxserve.sharding import placed, state_shardings
from jaxserve.steps.executable_store import Unnameable, key_of, our_sources

# Begins the fingerprints of weights whose settings have no name, which no other process has.
_THIS_PROCESS = os.urandom(16)


def sharded(params: Any, mesh: Mesh, model_config: Any) -> Any:
    """Return `params` on `mesh` by the rules of `sharding`; arrays already there are not copied.

    Raises:
      InvalidConfigError: a dimension of a parameter is not divisible by its mesh axis.
    """
    check_fits(mesh, model_config)
    return placed(params, state_shardings(params, mesh))


def check_same(params: Any, expected: Any, *, partial: bool = False) -> None:
    """Raise InvalidParamsError if structure, shapes or dtypes of two states differ.

    The message names the first difference. Either state may be abstract. A floating dtype may
    differ, except from that of a parameter with the metadata `has_own_dtype`. If `partial`,
    `params` may lack some parameters.
    """
    new, now = (dict(nnx.to_flat_state(tree)) for tree in (params, expected))
    missing = [] if partial else [path for path in now if path not in new]
    problems = [f"{'.'.join(map(str, path))} is missing" for path in missing]
    problems += [f"{'.'.join(map(str, path))} is unknown" for path in new if path not in now]
    problems += [
        f"{'.'.join(map(str, path))} is {array.dtype}{array.shape} instead of "
        f"{old.get_value().dtype}{old.get_value().shape}"
        for path, old in now.items()
        if path in new and not _fits(array := new[path].get_value(), old)
    ]
    if problems:
        raise InvalidParamsError(
            f"the parameters do not fit this model: {problems[0]}"
            + (f", and {len(problems) - 1} more problems" if problems[1:] else "")
            + "; pass a state of the same structure and shapes"
        )


def _fits(array: Any, old: nnx.Variable) -> bool:
    like = old.get_value()
    if array.shape != like.shape or array.dtype == like.dtype:
        return array.shape == like.shape
    has_own_dtype = old.get_metadata().get("has_own_dtype", False)
    return not has_own_dtype and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (array, like))


def check_usable(params: Any) -> None:
    """Raise InvalidParamsError if an array of `params` was deleted, or has NaN or infinite numbers.

    Every array is read once where it is; the check of each shape is compiled at its first use.
    """
    if not isinstance(params, nnx.State):
        raise InvalidParamsError(
            f"parameters of the type {type(params).__name__} are not allowed; pass an nnx.State, "
            "such as nnx.state(model, nnx.Param)"
        )
    variables = nnx.to_flat_state(params)
    for path, variable in variables:
        if not isinstance(variable, nnx.Variable):
            raise InvalidParamsError(
                f"the parameter {'.'.join(map(str, path))} is of the type "
                f"{type(variable).__name__}; pass a state of nnx.Param, such as nnx.state(model, "
                "nnx.Param)"
            )
    flat = [(path, variable.get_value()) for path, variable in variables]
    for path, array in flat:
        if isinstance(array, jax.Array) and array.is_deleted():
            raise InvalidParamsError(
                f"the parameter {'.'.join(map(str, path))} was deleted, as donated arrays are; do "
                "not donate parameters that a runtime gets or serves"
            )
    found = [
        (path, _all_finite(array))
        for path, array in flat
        if jnp.issubdtype(array.dtype, jnp.floating)
    ]
    bad = [".".join(map(str, path)) for path, is_finite in found if not is_finite]
    if bad:
        raise InvalidParamsError(
            f"the parameter {bad[0]} has NaN or infinite numbers{_and_more(bad)}; the present "
            "weights go on serving. Pass parameters of a training step that is finite"
        )


def check_stored(params: nnx.State, given: nnx.State) -> None:
    """Raise InvalidParamsError if finite weights became infinite in the model's dtypes and formats.

    `params` is `given` in these. Arrays that can hold all numbers of the given ones are not read.
    """
    widest = max((_largest(v.get_value().dtype) for _, v in nnx.to_flat_state(given)), default=0.0)
    flat = [(path, variable.get_value()) for path, variable in nnx.to_flat_state(params)]
    _check_casts(
        [
            (path, array.dtype, _all_finite(array))
            for path, array in flat
            if 0.0 < _largest(array.dtype) < widest
        ]
    )


def _check_casts(casts: Sequence[tuple[tuple[Any, ...], Any, jax.Array]]) -> None:
    """Raise InvalidParamsError unless all casts (path, new dtype, is finite) are finite."""
    bad = [(".".join(map(str, path)), dtype) for path, dtype, is_finite in casts if not is_finite]
    if bad:
        raise InvalidParamsError(
            f"the parameter {bad[0][0]} has numbers above {_largest(bad[0][1]):.6g}, the largest "
            f"of the model's {bad[0][1]}{_and_more(bad)}; the present weights go on serving. Pass "
            "smaller numbers, or serve the model in bfloat16 or float32"
        )


def _largest(dtype: Any) -> float:
    """Return the largest number of a floating dtype; 0 for other dtypes."""
    return float(jnp.finfo(dtype).max) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def _and_more(found: Sequence[Any]) -> str:
    return f", and so have {len(found) - 1} more" if found[1:] else ""


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    wide = array.astype(jnp.float32) if array.dtype.itemsize < 4 else array
    return jnp.isfinite(wide).all()


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
    """Return a hash of weights and settings that is the same in every run, and on every mesh.

    It covers every bit of every parameter, and is computed where they are. Adapters do not count:
    the keys of their pages tell them apart. The settings and our sources, which compute with the
    weights, count as well. Settings that `key_of` cannot name match no other process's.
    """
    try:
        digest = blake2b(key_of(our_sources(), settings).encode(), digest_size=16)
    except Unnameable:
        digest = blake2b(_THIS_PROCESS, digest_size=16)
    leaves = jax.tree_util.tree_leaves_with_path(without_adapters(params))
    sums = jax.device_get([_sums(leaf) for _, leaf in leaves])
    for (path, leaf), numbers in zip(leaves, sums, strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}".encode())
        digest.update(np.asarray(numbers, "<u4").tobytes())
    return digest.digest()


@jax.jit
def _sums(array: jax.Array) -> tuple[jax.Array, ...]:
    """Return four sums of hashes of an array's elements and their places.

    Arrays that differ in one element have different sums; other arrays have equal sums with a
    probability of about 2^-128. Integer sums do not depend on their order, and so on no mesh.
    """
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    else:
        info = jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo
        width = min(int(info(array.dtype).bits), 32)
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        numbers = jax.lax.iota(jnp.uint32, size) + np.uint32((axis + 1) * 0x9E3779B9 % 2**32)
        place = place[..., None] + _mixed(numbers)
    terms = [_mixed(bits ^ place)]
    for _ in range(3):
        product = terms[-1] * np.uint32(0x9E3779B9)
        terms.append(product ^ product >> 15)
    return jax.lax.reduce(
        tuple(terms),
        (jnp.uint32(0),) * len(terms),
        lambda left, right: tuple(map(jnp.add, left, right)),
        tuple(range(bits.ndim)),
    )


def _mixed(words: jax.Array) -> jax.Array:
    """Return 32-bit words as MurmurHash3's finalizer mixes them, one to one."""
    words = (words ^ words >> 16) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> 13) * np.uint32(0xC2B2AE35)
    return words ^ words >> 16


def fitted(params: Any, old: Any, *, partial: bool = False) -> Any:
    """Return `params` on the devices and in the dtypes of `old`.

    Arrays that are there already, in the same dtype, are not copied. If `partial`, parameters that
    `params` lacks stay those of `old`. Raises InvalidParamsError if structure, shapes or dtypes
    differ (`check_same`), or a number is infinite in the dtype of `old`.
    """
    check_same(params, old, partial=partial)
    new = dict(nnx.to_flat_state(params))
    casts = []

    def own(path: tuple[Any, ...], old: nnx.Variable) -> nnx.Variable:
        if path not in new:
            return old
        array, like = new[path].get_value(), old.get_value()
        if array.dtype != like.dtype:
            is_narrower = _largest(like.dtype) < _largest(array.dtype)
            with np.errstate(over="ignore"):  # of NumPy's arrays; it is checked
                array = array.astype(like.dtype)
            if is_narrower:
                casts.append((path, like.dtype, _all_finite(array)))
        return old.replace(placed(array, like.sharding))

    found = nnx.from_flat_state([(path, own(path, old)) for path, old in nnx.to_flat_state(old)])
    _check_casts(casts)
    return found
