"""AWQ folders in the layout "gemm" of AutoAWQ.

A module has `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8] and `scales`
[groups, out]. Source: AutoAWQ, awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int32, UInt8

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.matrix import (
    Found,
    Matrix,
    reader,
    unpacked,
    whole_number,
)
from jaxserve.models.source import WeightSource

_BITS = 4
# The place of each of eight columns in a word, which has columns 0, 2, 4, 6, 1, 3, 5, 7.
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


@final
@dataclass(frozen=True, kw_only=True)
class AWQ:
    """See `Method`.

    Attributes:
      group: number of inputs that share a scale; -1 for all.
    """

    group: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`.

        Raises:
          UnsupportedModelError: another number of bits, or another layout.
        """
        given = {"bits": given.get("w_bit"), "group_size": given.get("q_group_size"), **given}
        bits, group = whole_number(given, "bits"), whole_number(given, "group_size")
        version = str(given.get("version", "gemm")).lower()
        if bits != _BITS or group is None or not (group == -1 or group > 0) or version != "gemm":
            raise UnsupportedModelError(
                f"quantization_config of 'awq' has bits={given.get('bits')!r}, group_size="
                f"{given.get('group_size')!r} and version={given.get('version')!r}; 4 bits in the "
                "version 'gemm' are read, in groups or with group_size -1"
            )
        return cls(group=group)

    def matrices(self, source: WeightSource, found: Found) -> None:
        """See `Method`."""
        found.add_modules("qweight", partial(self._matrix, source, found))

    def _matrix(self, source: WeightSource, found: Found, module: str) -> Matrix | None:
        sizes = found.sizes(module, "qweight")
        if sizes is None:
            return None
        num_inputs, words = sizes
        num_outputs = words * 32 // _BITS
        group = num_inputs if self.group == -1 else self.group
        if found.uneven_groups(module, num_inputs, group, _BITS):
            return None
        num_groups = num_inputs // group
        wanted = {
            "qweight": (num_inputs, words),
            "qzeros": (num_groups, words),
            "scales": (num_groups, num_outputs),
        }
        if found.wrong_shapes(module, wanted):
            return None
        read = reader(source, module)
        return Matrix(
            shape=(num_outputs, num_inputs),
            bits=_BITS,
            group=group,
            tensors=tuple(f"{module}.{last}" for last in wanted),
            codes=lambda: _columns(read("qweight")).T,
            scales=lambda: read("scales").T,
            zeros=lambda: _columns(read("qzeros")).T,
        )


def _columns(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows columns"]:
    """Return the numbers of each row in the order of the columns."""
    numbers = unpacked(words, _BITS)
    return numbers.reshape(len(words), -1, 8)[..., _PLACES].reshape(numbers.shape)
