"""Weights of a GGUF file in the blocks that it stores, without rounding anything."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.gguf_blocks import BLOCK_TYPES, CommonForm, Part
from jaxserve.models.gguf_file import TensorInfo
from jaxserve.models.gguf_source import GGUFSource
from jaxserve.models.linear import WeightAxes
from jaxserve.models.quantised import QuantisedWeight, in_axes_last
from pallas_kernels import PackedMatrix
from pallas_kernels.quantised_matmul import Rounding, pack

_log = logging.getLogger(__name__)

# Reads a parameter, or the shape that is given, from a source in a dtype.
Read = Callable[..., jax.Array]


@final
class KeptBlocks:
    """Makes weights of a file's blocks. Tensors of other types are dequantised, which is logged.

    A weight that is fused from tensors of several types has the form that holds all of them.
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
                    self._source.where, sorted(found), names[0], sorted(BLOCK_TYPES),
                )  # fmt: skip
            return None
        form = CommonForm.of([BLOCK_TYPES[name] for name in found])
        shape = dense.get_value().shape
        last = axes.split(range(len(shape)))[1][-1]
        # One scale is read for each `unit` numbers: a group, or the part of it in the last axis.
        unit = math.gcd(form.group, shape[last])
        fewer = tuple(n // unit if axis == last else n for axis, n in enumerate(shape))
        others: tuple[Part, ...] = ("scales", "minima") if form.has_minima else ("scales",)
        parts = {"codes": read(_Part(self._source, form, "codes", 1), np.dtype("uint8"))}
        for part in others:
            own = _Part(self._source, form, part, unit)
            parts[part] = read(own, np.dtype("float32"), fewer)
        _, summed, out = axes.split(shape)
        return QuantisedWeight(
            _packed(parts, axes, form, form.group // unit),
            axes.split(dense.get_metadata()["logical_axes"]),
            width=int(np.prod(summed)),
            out=out[-1],
            rounds_activations=self._rounds_activations,
        )


@final
class _Part:
    """A `WeightSource` of the codes, the scales or the minima, for every `unit`-th number."""

    def __init__(self, source: GGUFSource, form: CommonForm, part: Part, unit: int):
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

        def decode(info: TensorInfo, rows: np.ndarray) -> np.ndarray:
            return self._form.part(self._part, BLOCK_TYPES[info.type_name], rows, self._unit)

        return self._source.read_as(decode, name, index)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _packed(
    parts: dict[str, jax.Array], axes: WeightAxes, form: CommonForm, every: int
) -> PackedMatrix:
    codes = in_axes_last(parts["codes"], axes)

    def by_group(part: Part) -> Any:
        if part not in parts:
            return None
        each = in_axes_last(parts[part], axes)[..., ::every]
        return each.astype(jnp.float16 if form.has_halves else jnp.float32)

    ones = jnp.ones(codes.shape[:-1], jnp.float32)
    return pack(
        codes, ones, by_group("scales"), by_group("minima"), bits=form.bits, group=form.group
    )
