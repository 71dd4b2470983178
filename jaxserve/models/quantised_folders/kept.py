"""Weights of a folder in the codes, scales and zero points that it stores."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32, Int32

from jaxserve.core.errors import CheckpointError
from jaxserve.models.linear import WeightAxes
from jaxserve.models.quantised import INT8, QuantisedWeight, in_axes_last
from jaxserve.models.quantised_folders.matrix import Matrix
from jaxserve.models.quantised_folders.source import QuantisedFolder
from pallas_kernels import PackedMatrix
from pallas_kernels.quantised_matmul import Rounding, pack

_log = logging.getLogger(__name__)

Part = Literal["codes", "channels", "scales", "zeros"]
# Reads a parameter, or the shape that is given, from a source in a dtype.
Read = Callable[..., jax.Array]


@final
class KeptMatrices:
    """Makes weights of a folder's codes, without rounding.

    Tensors that are fused to one weight must have the same bits, groups and order of inputs;
    otherwise they are dequantised, which is logged.
    """

    def __init__(self, source: QuantisedFolder, *, rounds_activations: Rounding | None):
        self._source = source
        self._rounds_activations: Rounding | None = rounds_activations

    def weight(
        self, dense: nnx.Variable, axes: WeightAxes, names: Sequence[str], read: Read
    ) -> QuantisedWeight | None:
        """Return the weight that these tensors fill; None if it cannot keep their codes.

        Args:
          names: those of the first stacked matrix first, and so on.

        Raises:
          CheckpointError: the groups of inputs are not of one size.
        """
        found = [self._source.matrix(name) for name in names]
        matrices = [each for each in found if each is not None]
        if not matrices:
            return None
        shape = dense.get_value().shape
        stacked, summed, out = axes.split(shape)
        forms = {(each.bits, each.group, each.is_float) for each in matrices}
        order = "differ"
        if len(matrices) == len(names) and all(each.has_even_groups for each in matrices):
            orders = [self._order(*each) for each in zip(names, matrices, strict=True)]
            order = _common(orders, math.prod(stacked))
        if len(forms) > 1 or isinstance(order, str):
            _log.warning(
                "%s: %s and the tensors that are fused with it are dequantised, as they differ in "
                "their bits, groups or order of inputs, some are dense, or groups do not divide "
                "the inputs",
                self._source.where, names[0],
            )  # fmt: skip
            return None
        if order is not None:
            order = order.reshape(*stacked, -1)
        (bits, group, is_float), *_ = forms
        form = _Form(matrices, is_channel=group == math.prod(summed))
        last = axes.split(range(len(shape)))[1][-1]
        unit = math.gcd(group, shape[last])
        fewer = tuple(n // unit if axis == last else n for axis, n in enumerate(shape))
        parts = {
            part: read(
                _Part(self._source, form, part, 1 if part == "codes" else unit),
                form.dtype(part),
                shape if part == "codes" else fewer,
            )
            for part in form.parts
        }
        every = group // unit
        width = INT8.group if form.is_channel else group
        matrix = _packed(parts, axes, bits, width, every, is_float)
        return QuantisedWeight(
            matrix,
            axes.split(dense.get_metadata()["logical_axes"]),
            width=math.prod(summed),
            out=out[-1],
            rounds_activations=None if is_float else self._rounds_activations,
            order=order,
        )

    def _order(self, name: str, matrix: Matrix) -> Int32[np.ndarray, " in"] | None:
        try:
            return matrix.order()
        except ValueError as error:
            raise CheckpointError(
                self._source.where, [f"{name}: {error}"], "fetch the checkpoint again"
            ) from error


def _common(
    orders: Sequence[Int32[np.ndarray, " in"] | None], num_stacked: int
) -> Int32[np.ndarray, "stacked in"] | None | Literal["differ"]:
    """Return the order of each stacked matrix; None if all are in order."""
    if all(order is None for order in orders):
        return None
    known = next(order for order in orders if order is not None)
    whole = [np.arange(len(known), dtype=np.int32) if each is None else each for each in orders]
    chunks = np.stack(whole).reshape(num_stacked, -1, len(known))
    return chunks[:, 0] if (chunks == chunks[:, :1]).all() else "differ"


@final
class _Form:
    """How the scales and zero points of some matrices are stored together, exactly.

    Scales are float16 numbers times a power of two for each output, where these hold them, and else
    float32. With one scale for each output there are no others.
    """

    def __init__(self, matrices: Sequence[Matrix], *, is_channel: bool):
        self.is_channel = is_channel
        self.has_zeros = any(
            each.zeros is not None and (each.zeros() != each.middle).any() for each in matrices
        )
        self._zero_dtype = np.dtype("uint8" if matrices[0].bits == 4 else "int16")
        scales = [each.scales() for each in matrices]
        are_plain = all(each.dtype == np.float16 for each in scales)
        self._uses_powers = not are_plain and all(map(_are_halves, scales))
        has_halves = are_plain or self._uses_powers
        self._scale_dtype = np.dtype("float16" if has_halves else "float32")

    @property
    def parts(self) -> tuple[Part, ...]:
        scales: tuple[Part, ...] = () if self.is_channel else ("scales",)
        return ("codes", "channels", *scales, *(("zeros",) if self.has_zeros else ()))

    def dtype(self, part: Part) -> np.dtype:
        return {
            "codes": np.dtype("uint8"),
            "channels": np.dtype("float32"),
            "scales": self._scale_dtype,
            "zeros": self._zero_dtype,
        }[part]

    def part(self, part: Part, matrix: Matrix) -> np.ndarray:
        """Return codes [out, in] in the order of groups, or another part [out, groups]."""
        if part == "codes":
            order = matrix.order()
            return matrix.codes() if order is None else matrix.codes()[:, order]
        scales = matrix.scales().astype(np.float32)
        if part == "zeros":
            return np.full(scales.shape, matrix.middle) if matrix.zeros is None else matrix.zeros()
        if self.is_channel:
            channels = scales
        else:
            channels = _powers(scales) if self._uses_powers else np.ones_like(scales[:, :1])
        return np.broadcast_to(channels, scales.shape) if part == "channels" else scales / channels


@final
class _Part:
    """A `WeightSource` of a part of a folder's matrices, for every `unit`-th input."""

    def __init__(self, source: QuantisedFolder, form: _Form, part: Part, unit: int):
        self.where = source.where
        self._source = source
        self._form = form
        self._part: Part = part
        self._unit = unit

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return self._source.shapes()

    def dtypes(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        return self._source.dtypes()

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """See `WeightSource`."""
        matrix = self._source.matrix(name)
        assert matrix is not None, f"{name} is dense"
        found = self._form.part(self._part, matrix)
        if self._part != "codes":
            found = np.repeat(found, matrix.group // self._unit, axis=1)
        return found if index is None else found[index]


def _powers(scales: Float32[np.ndarray, "out groups"]) -> Float32[np.ndarray, "out 1"]:
    """Return, for each output, a power of two around its largest scale; 1 for zeros."""
    largest = np.max(np.abs(scales), axis=1, keepdims=True)
    return np.ldexp(np.float32(1), np.clip(np.frexp(largest)[1] - 1, -126, 127))


def _are_halves(scales: np.ndarray) -> bool:
    """Return whether scales are float16 numbers times a power of two for each output."""
    scales = scales.astype(np.float32)
    if not np.isfinite(scales).all():
        return False
    unit = scales / _powers(scales)
    return bool((unit.astype(np.float16).astype(np.float32) == unit).all())


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _packed(
    parts: dict[Part, jax.Array],
    axes: WeightAxes,
    bits: int,
    group: int,
    every: int,
    is_float: bool,
) -> PackedMatrix:
    codes = in_axes_last(parts["codes"], axes)
    depth = codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -depth % group)])

    def by_group(part: Part) -> Any:
        if part not in parts:
            return None
        found = in_axes_last(parts[part], axes)[..., ::every]
        num_groups = codes.shape[-1] // group  # more than one for a scale of each output
        return found if found.shape[-1] == num_groups else jnp.repeat(found, num_groups, axis=-1)

    channels = in_axes_last(parts["channels"], axes)[..., 0]
    scales, zeros = by_group("scales"), by_group("zeros")
    return pack(
        *(codes, channels, scales, None), bits=bits, group=group, zeros=zeros, is_float=is_float
    )
