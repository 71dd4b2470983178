"""One weight of a folder in few bits, and the unpacking that the formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Int32, UInt8

from jaxserve.models.weights import WeightSource


@final
@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight [out, in] whose number at [n, k] is `scales[n, g] * (codes[n, k] - zeros[n, g])`.

    g is the group of input k: k // group, or `groups[k]`. Weights of several matrices have more
    axes before these two.
    """

    shape: tuple[int, ...]
    bits: int  # of a code: 4 or 8
    group: int  # number of inputs that share a scale; `in` for one scale a row
    tensors: tuple[str, ...]  # names of the tensors that it is made of
    codes: Callable[[], UInt8[np.ndarray, "*matrices out in"]]  # reads [out, in]
    # Reads [out, in // group], of float8 rounded up, in float16, bfloat16 or float32.
    scales: Callable[[], Float[np.ndarray, "*matrices out groups"]]
    # Reads zero points as `scales`; None if all are 8, or 128 with 8 bits.
    zeros: Callable[[], Int[np.ndarray, "out groups"]] | None = None
    # Reads the group of each input, [in]; None if it is k // group.
    groups: Callable[[], Int32[np.ndarray, " in"]] | None = None
    # Whether a code is a float8_e4m3fn number; there are no zero points then.
    is_float: bool = False

    @property
    def has_even_groups(self) -> bool:
        """Whether groups divide the inputs, and words of 32 bits the groups."""
        return self.shape[-1] % self.group == 0 and self.group * self.bits % 32 == 0

    @property
    def num_groups(self) -> int:
        return self.shape[-1] // self.group

    @property
    def middle(self) -> int:
        """The code of zero if there are no zero points."""
        return 1 << (self.bits - 1)

    def order(self) -> Int32[np.ndarray, " in"] | None:
        """Return the inputs sorted by group; None if sorted. Raise ValueError for uneven groups."""
        found = None if self.groups is None else self.groups()
        if found is None or (found == np.arange(self.shape[-1]) // self.group).all():
            return None
        in_range = ((found >= 0) & (found < self.num_groups)).all()
        if not in_range or (np.bincount(found, minlength=self.num_groups) != self.group).any():
            raise ValueError(
                f"its g_idx does not have {self.group} inputs in each of {self.num_groups} groups"
            )
        return np.argsort(found, kind="stable").astype(np.int32)

    def numbers(self) -> Float[np.ndarray, "*matrices out in"]:
        scales = self.scales().astype(np.float32)
        if self.is_float:
            numbers = self.codes().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            return numbers * np.repeat(scales, self.group, axis=-1)[..., : self.shape[-1]]
        zeros = self.middle if self.zeros is None else self.zeros().astype(np.float32)
        group = np.arange(self.shape[-1]) // self.group if self.groups is None else self.groups()
        offsets = zeros if isinstance(zeros, int) else zeros[..., group]
        return (self.codes().astype(np.float32) - offsets) * scales[..., group]


@final
@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A weight whose numbers have no whole codes, so that it is served as a dense one."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]  # names of the tensors that it is made of
    numbers: Callable[[], Float[np.ndarray, "*shape"]]  # reads it


class Method(Protocol):
    """A format of quantised folders, with the settings of one folder."""

    def matrices(self, source: WeightSource, found: Found) -> None:
        """Add every quantised weight of a folder, or its problem, to `found`."""
        ...


@final
class Found:
    """The quantised weights of a folder by name, and its problems, collected.

    Attributes:
      shapes: of the folder's tensors.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = shapes
        self.matrices: dict[str, Matrix | Decoded] = {}
        self.problems: list[str] = []

    def modules(self, suffix: str) -> Iterator[str]:
        """Yield the names of modules that have a tensor of this suffix, such as "qweight"."""
        for name in self.shapes:
            module, _, last = name.rpartition(".")
            if last == suffix:
                yield module

    def add_modules(self, suffix: str, matrix: Callable[[str], Matrix | None]) -> None:
        """Add `matrix(module)` of each module with a tensor of this suffix, unless it is None."""
        for module in self.modules(suffix):
            made = matrix(module)
            if made is not None:
                self.matrices[f"{module}.weight"] = made

    def sizes(self, module: str, last: str) -> tuple[int, int] | None:
        """Return the two sizes of a tensor; None after recording its problem."""
        name = f"{module}.{last}"
        shape = self.shapes.get(name)
        if shape is None:
            self.problems.append(f"missing tensor {name}")
        elif len(shape) != 2 or 0 in shape:
            self.problems.append(f"tensor {name} has shape {shape}, not two sizes of at least 1")
        else:
            return shape[0], shape[1]
        return None

    def wrong_shapes(self, module: str, wanted: Mapping[str, Sequence[int]]) -> bool:
        """Record missing or misshapen tensors of a module; return whether there are any."""
        problems = []
        for last, shape in wanted.items():
            found = self.shapes.get(f"{module}.{last}")
            if found is None:
                problems.append(f"missing tensor {module}.{last} {tuple(shape)}")
            elif tuple(found) != tuple(shape):
                problems.append(f"tensor {module}.{last} has shape {found}, not {tuple(shape)}")
        self.problems += problems
        return bool(problems)

    def uneven_groups(self, module: str, num_inputs: int, group: int, bits: int) -> bool:
        """Return whether a group does not divide a module's inputs, and record it."""
        if num_inputs % group == 0 and group % (32 // bits) == 0:
            return False
        self.problems.append(
            f"{module} has {num_inputs} inputs, which groups of {group} do not divide; groups of "
            f"{bits}-bit numbers divide the inputs and are multiples of {32 // bits}"
        )
        return True


def reader(source: WeightSource, module: str) -> Callable[[str], np.ndarray]:
    """Return a function that reads a tensor of a module by the last part of its name."""
    return lambda last: source.read(f"{module}.{last}")


def unpacked(
    words: Int32[np.ndarray, "*rows words"], bits: int
) -> UInt8[np.ndarray, "*rows numbers"]:
    """Return the unsigned numbers of 32-bit words, those in the lowest bits first."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def whole_number(given: Mapping[str, Any], name: str) -> int | None:
    """Return a setting that is a whole number; None if it is missing or not one."""
    value = given.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
