"""Weights in the form that a checkpoint stores: GGUF blocks, or a folder's codes in few bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32, Int32

from jaxserve.core.errors import CheckpointError
from jaxserve.kernels import PackedMatrix
from jaxserve.kernels.quantised_matmul import Rounding, pack
from jaxserve.models.gguf import BLOCK_TYPES, CommonForm, GGUFSource, TensorInfo
from jaxserve.models.linear import WeightAxes
from jaxserve.models.quantised import INT8, QuantisedWeight, in_axes_last
from jaxserve.models.quantised_folders.folder import QuantisedFolder
from jaxserve.models.quantised_folders.matrix import Matrix
from jaxserve.models.weights import WeightSource

_log = logging.getLogger(__name__)

Part = Literal["codes", "channels", "scales", "minima", "zeros"]
Index = tuple[slice, ...] | None
# Reads a parameter of the given shape from a source, in a dtype.
Read = Callable[[WeightSource, np.dtype, tuple[int, ...]], jax.Array]


@final
class KeptBlocks:
    """Makes weights from the blocks of a GGUF file.

    A weight that is fused from tensors of several types has the form that holds all of them.
    Tensors of types that are not kept are dequantised, which is logged.
    """

    def __init__(self, source: GGUFSource, *, rounds_activations: Rounding | None):
        self._source = source
        self._rounds_activations: Rounding | None = rounds_activations

    def weight(
        self, dense: nnx.Variable, axes: WeightAxes, names: Sequence[str], read: Read
    ) -> QuantisedWeight | None:
        """Return the weight that these tensors fill; None if a tensor is not of `BLOCK_TYPES`."""
        found = {self._source.type_name(name) for name in names}
        if not found <= BLOCK_TYPES.keys():
            if not found <= {"F32", "F16", "BF16", "F64"}:
                _log.warning(
                    "%s: tensors of types %s, such as %s, are dequantised; kept are %s",
                    self._source.where,
                    sorted(found),
                    names[0],
                    sorted(BLOCK_TYPES),
                )
            return None
        form = CommonForm.of([BLOCK_TYPES[name] for name in found])

        def part_source(part: Part, unit: int) -> WeightSource:
            assert part in ("codes", "scales", "minima")

            def decode(info: TensorInfo, rows: np.ndarray) -> np.ndarray:
                return form.part(part, BLOCK_TYPES[info.type_name], rows, unit)

            return _PartSource(self._source, partial(self._source.read_as, decode))

        number = np.dtype("float32")
        parts: dict[Part, np.dtype] = {"codes": np.dtype("uint8"), "scales": number}
        if form.has_minima:
            parts["minima"] = number
        return _weight(
            dense,
            axes,
            read,
            part_source,
            parts,
            stored_group=form.group,
            bits=form.bits,
            group=form.group,
            scale_dtype="float16" if form.has_halves else "float32",
            rounds_activations=self._rounds_activations,
        )


@final
class KeptMatrices:
    """Makes weights from a folder's codes, scales and zero points.

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

        `names` has those of the first stacked matrix first, and so on. Raises CheckpointError if
        groups of inputs differ in size.
        """
        found = [self._source.matrix(name) for name in names]
        matrices = [each for each in found if each is not None]
        if not matrices:
            return None
        stacked, summed, _ = axes.split(dense.get_value().shape)
        forms = {(each.bits, each.group, each.is_float) for each in matrices}
        order = "differ"
        if len(matrices) == len(names) and all(each.has_even_groups for each in matrices):
            orders = [self._order(*each) for each in zip(names, matrices, strict=True)]
            order = _common_order(orders, math.prod(stacked))
        if len(forms) > 1 or isinstance(order, str):
            _log.warning(
                "%s: %s and the tensors that are fused with it are dequantised, as they differ in "
                "their bits, groups or order of inputs, some are dense, or groups do not divide "
                "the inputs",
                self._source.where,
                names[0],
            )
            return None
        (bits, group, is_float), *_ = forms
        scaling = _Scaling(matrices, is_channel=group == math.prod(summed))

        def part_source(part: Part, unit: int) -> WeightSource:
            return _PartSource(self._source, partial(self._read, scaling, part, unit))

        return _weight(
            dense,
            axes,
            read,
            part_source,
            scaling.parts,
            stored_group=group,
            bits=bits,
            group=INT8.group if scaling.is_channel else group,
            scale_dtype=scaling.dtype.name,
            is_float=is_float,
            rounds_activations=None if is_float else self._rounds_activations,
            order=None if order is None else order.reshape(*stacked, -1),
        )

    def _order(self, name: str, matrix: Matrix) -> Int32[np.ndarray, " in"] | None:
        try:
            return matrix.order()
        except ValueError as error:
            raise CheckpointError(
                self._source.where, [f"{name}: {error}"], "fetch the checkpoint again"
            ) from error

    def _read(
        self, scaling: _Scaling, part: Part, unit: int, name: str, index: Index
    ) -> np.ndarray:
        matrix = self._source.matrix(name)
        assert matrix is not None, f"{name} is dense"
        found = scaling.part(part, matrix)
        if part != "codes":
            found = np.repeat(found, matrix.group // unit, axis=-1)
        return found if index is None else found[index]


def _common_order(
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
class _Scaling:
    """The common storage of some matrices' scales and zero points, exactly.

    Scales are float16 numbers times a power of two for each output if that holds them, and float32
    otherwise. With one scale for each output (`is_channel`) there are no scales of groups.
    """

    def __init__(self, matrices: Sequence[Matrix], *, is_channel: bool):
        self.is_channel = is_channel
        has_zeros = any(
            each.zeros is not None and (each.zeros() != each.middle).any() for each in matrices
        )
        scales = [each.scales() for each in matrices]
        are_plain = all(each.dtype == np.float16 for each in scales)
        self._uses_powers = not are_plain and all(map(_are_halves, scales))
        self.dtype = np.dtype("float16" if are_plain or self._uses_powers else "float32")
        self.parts: dict[Part, np.dtype] = {
            "codes": np.dtype("uint8"),
            "channels": np.dtype("float32"),
        }
        if not is_channel:
            self.parts["scales"] = self.dtype
        if has_zeros:
            self.parts["zeros"] = np.dtype("uint8" if matrices[0].bits == 4 else "int16")

    def part(self, part: Part, matrix: Matrix) -> np.ndarray:
        """Return codes [out, in] in the order of groups, or another part [out, groups]."""
        if part == "codes":
            order = matrix.order()
            return matrix.codes() if order is None else matrix.codes()[..., order]
        scales = matrix.scales().astype(np.float32)
        if part == "zeros":
            return np.full(scales.shape, matrix.middle) if matrix.zeros is None else matrix.zeros()
        if self.is_channel:
            channels = scales
        else:
            channels = _powers(scales) if self._uses_powers else np.ones_like(scales[..., :1])
        return np.broadcast_to(channels, scales.shape) if part == "channels" else scales / channels


def _powers(
    scales: Float32[np.ndarray, "*matrices out groups"],
) -> Float32[np.ndarray, "*matrices out 1"]:
    """Return, for each output, a power of two around its largest scale; 1 for zeros."""
    largest = np.max(np.abs(scales), axis=-1, keepdims=True)
    return np.ldexp(np.float32(1), np.clip(np.frexp(largest)[1] - 1, -126, 127))


def _are_halves(scales: np.ndarray) -> bool:
    """Return whether scales are float16 numbers times a power of two for each output."""
    scales = scales.astype(np.float32)
    if not np.isfinite(scales).all():
        return False
    unit = scales / _powers(scales)
    return bool((unit.astype(np.float16).astype(np.float32) == unit).all())


@final
class _PartSource:
    """A `WeightSource` of one part of kept weights."""

    def __init__(self, source: WeightSource, read: Callable[[str, Index], np.ndarray]):
        self.where = source.where
        self._source = source
        self._read = read

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def dtypes(self) -> Mapping[str, str]:
        return self._source.dtypes()

    def read(self, name: str, index: Index = None) -> np.ndarray:
        return self._read(name, index)


@final
@dataclass(frozen=True)
class _Packing:
    """The static arguments of `_packed`."""

    bits: int
    group: int  # numbers that share a scale in the packed matrix
    every: int  # distance between the values of a part along the in axes; each belongs to a group
    scale_dtype: str
    is_float: bool


def _weight(
    dense: nnx.Variable,
    axes: WeightAxes,
    read: Read,
    part_source: Callable[[Part, int], WeightSource],
    parts: Mapping[Part, np.dtype],  # the dtype of each part
    *,
    stored_group: int,  # numbers that share a scale in the checkpoint
    bits: int,
    group: int,  # numbers that share a scale in the weight
    scale_dtype: str,
    is_float: bool = False,
    rounds_activations: Rounding | None,
    order: Int32[np.ndarray, "*stacked in"] | None = None,  # see `QuantisedWeight`
) -> QuantisedWeight:
    """Read the parts of a weight; `part_source` has one value of a part for `unit` numbers."""
    shape = dense.get_value().shape
    _, summed, out = axes.split(shape)
    last = axes.split(range(len(shape)))[1][-1]
    # One scale is read for each `unit` numbers: a group, or the part of it in the last axis.
    unit = math.gcd(stored_group, shape[last])
    fewer = tuple(n // unit if axis == last else n for axis, n in enumerate(shape))
    arrays = {
        part: read(part_source(part, 1), dtype, shape)
        if part == "codes"
        else read(part_source(part, unit), dtype, fewer)
        for part, dtype in parts.items()
    }
    packing = _Packing(bits, group, stored_group // unit, scale_dtype, is_float)
    return QuantisedWeight(
        _packed(arrays, axes, packing),
        axes.split(dense.get_metadata()["logical_axes"]),
        width=math.prod(summed),
        out=out[-1],
        rounds_activations=rounds_activations,
        order=order,
    )


@partial(jax.jit, static_argnums=(1, 2))
def _packed(parts: dict[Part, jax.Array], axes: WeightAxes, packing: _Packing) -> PackedMatrix:
    codes = in_axes_last(parts["codes"], axes)
    depth = codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -depth % packing.group)])

    def by_group(part: Part) -> Any:
        if part not in parts:
            return None
        found = in_axes_last(parts[part], axes)[..., :: packing.every]
        num_groups = codes.shape[-1] // packing.group  # several for one scale of each output
        if found.shape[-1] != num_groups:
            found = jnp.repeat(found, num_groups, axis=-1)
        return found if part == "zeros" else found.astype(packing.scale_dtype)

    if "channels" in parts:
        channels = in_axes_last(parts["channels"], axes)[..., 0]
    else:
        channels = jnp.ones(codes.shape[:-1], jnp.float32)
    return pack(
        codes,
        channels,
        by_group("scales"),
        by_group("minima"),
        bits=packing.bits,
        group=packing.group,
        zeros=by_group("zeros"),
        is_float=packing.is_float,
    )
