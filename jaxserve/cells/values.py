"""Shapes and dtypes of the values that pass between cells, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Protocol, TypeAlias, final

import numpy as np

# A value that is given instead of computed. A number stands for an array filled with it.
Constant: TypeAlias = "bool | int | float | np.ndarray | np.generic"


class HasShape(Protocol):
    """An object with a shape and a dtype, such as `jax.ShapeDtypeStruct` and every array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


@final
@dataclass(frozen=True)
class ValueSpec:
    """Shape and dtype of a value, without the batch axis."""

    shape: tuple[int, ...]
    dtype: np.dtype
    # Types are looked up by their specs, and dtypes take long to hash.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, value: HasShape) -> ValueSpec:
        """Return the spec of a value, the same object for the same shape and dtype."""
        return _spec(tuple(value.shape), np.dtype(value.dtype))

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


@lru_cache(maxsize=4096)
def _spec(shape: tuple[int, ...], dtype: np.dtype) -> ValueSpec:
    return ValueSpec(shape, dtype)


@lru_cache(maxsize=4096)
def zeros(spec: ValueSpec) -> np.ndarray:
    """Return an array of zeros, the same object for the same spec."""
    found = np.zeros(spec.shape, spec.dtype)
    found.flags.writeable = False
    return found


def as_constant(value: Any, spec: ValueSpec) -> np.ndarray | None:
    """Return a constant as an array of the spec; None if it does not fit.

    A number fits every shape if its dtype keeps its value: an int fits an integer dtype that holds
    it, and every float dtype. An array must have the spec's shape and dtype. A writable array is
    copied, so that its owner may reuse it.
    """
    if isinstance(value, np.ndarray | np.generic):
        fits = value.shape == spec.shape and value.dtype == spec.dtype
        if not fits:
            return None
        array = np.asarray(value)
        return array.copy() if array.flags.writeable else array
    if not isinstance(value, bool | int | float):
        return None
    kind = spec.dtype.kind
    if kind in "iu":
        if not isinstance(value, int):
            return None
        limits = np.iinfo(spec.dtype)
        if not limits.min <= value <= limits.max:
            return None
    elif kind == "b" and not isinstance(value, bool):
        return None
    return np.full(spec.shape, value, spec.dtype) if value else zeros(spec)


def as_constants(values: Sequence[Any] | np.ndarray, spec: ValueSpec) -> np.ndarray | None:
    """Return a copy of the constants of many nodes as an array of the spec's dtype.

    None if they do not fit: integers fit every integer dtype that holds them all, and other values
    must have the spec's dtype.
    """
    array = np.array(values)
    if array.dtype != spec.dtype and array.dtype.kind in "iu" and spec.dtype.kind in "iu":
        converted = array.astype(spec.dtype)
        # A number that does not fit changes its value or its sign.
        if (converted == array).all():
            array = converted
    fits = array.ndim and array.shape[1:] == spec.shape and array.dtype == spec.dtype
    return array if fits else None
