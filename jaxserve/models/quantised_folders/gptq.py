"""GPTQ folders as AutoGPTQ and GPTQModel write them, and AWQ folders in AutoAWQ's layout "gemm".

In a GPTQ folder a module has `qweight` int32 [in * bits / 32, out], `scales` [groups, out],
`qzeros` int32 [groups, out * bits / 32] and `g_idx` int32 [in].
Source: AutoGPTQ, nn_modules/qlinear/qlinear_cuda.py.
In an AWQ folder it has `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8] and `scales`
[groups, out]. Source: AutoAWQ, awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int16, Int32, UInt8

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.quantised_folders.matrix import Found, Matrix, reader, unpacked, whole_number
from jaxserve.models.weights import WeightSource


@final
@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """The `Method` of GPTQ folders."""

    bits: int
    group: int  # number of inputs that share a scale; -1 for all
    one_less: bool  # whether `qzeros` are the zero points minus one, as in the first version
    is_symmetric: bool  # whether zero points are the middle of the numbers
    varies: bool  # whether modules may have different groups (GPTQModel's `dynamic`)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`; raise UnsupportedModelError for other bits or layouts."""
        bits, group = whole_number(given, "bits"), whole_number(given, "group_size")
        version = given.get("checkpoint_format") or "gptq"
        if given.get("is_marlin_format"):
            version = "marlin"
        if bits not in (4, 8) or group is None or not (group == -1 or group > 0):
            raise UnsupportedModelError(
                f"quantization_config of 'gptq' has bits={given.get('bits')!r} and group_size="
                f"{given.get('group_size')!r}; 4 and 8 bits are read, in groups or with "
                "group_size -1"
            )
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"quantization_config of 'gptq' has checkpoint_format={version!r}; 'gptq' and "
                "'gptq_v2' are read, so save the checkpoint in one of these"
            )
        return cls(
            bits=bits,
            group=group,
            one_less=version == "gptq",
            is_symmetric=bool(given.get("sym")),
            varies=bool(given.get("dynamic")),
        )

    def matrices(self, source: WeightSource, found: Found) -> None:
        found.add_modules("qweight", partial(self._matrix, source, found))

    def _matrix(self, source: WeightSource, found: Found, module: str) -> Matrix | None:
        sizes = found.sizes(module, "qweight")
        if sizes is None:
            return None
        words, num_outputs = sizes
        index = found.shapes.get(f"{module}.g_idx")
        if index is not None and (len(index) != 1 or 0 in index):
            found.problems.append(f"tensor {module}.g_idx has shape {index}, not (inputs,)")
            return None
        num_inputs = index[0] if index else words * 32 // self.bits
        bits = words * 32 // num_inputs
        if bits not in (4, 8) or (bits != self.bits and not self.varies):
            found.problems.append(
                f"{module} has {bits} bits a number, quantization_config says {self.bits}"
            )
            return None
        group = num_inputs if self.group == -1 else self.group
        scales = found.shapes.get(f"{module}.scales")
        if self.varies and scales and scales[0] and num_inputs % scales[0] == 0:
            group = num_inputs // scales[0]
        if found.uneven_groups(module, num_inputs, group, bits):
            return None
        num_groups = num_inputs // group
        wanted = {
            "qweight": (num_inputs * bits // 32, num_outputs),
            "qzeros": (num_groups, -(-num_outputs * bits // 32)),
            "scales": (num_groups, num_outputs),
            **({"g_idx": (num_inputs,)} if index else {}),
        }
        if found.wrong_shapes(module, wanted):
            return None
        read = reader(source, module)
        return Matrix(
            shape=(num_outputs, num_inputs),
            bits=bits,
            group=group,
            tensors=tuple(f"{module}.{last}" for last in wanted),
            codes=lambda: unpacked(read("qweight").T, bits),
            scales=lambda: read("scales").T,
            zeros=lambda: self._zeros(
                unpacked(read("qzeros"), bits)[:, :num_outputs].T.astype(np.int16), bits
            ),
            groups=(lambda: read("g_idx")) if index else None,
        )

    def _zeros(
        self, stored: Int16[np.ndarray, "out groups"], bits: int
    ) -> Int16[np.ndarray, "out groups"]:
        """Return zero points as they are stored, or one more.

        For symmetric weights they are the middle, which version 2 stores unchanged and version 1
        less one; some folders state the wrong version.
        """
        middle = 1 << (bits - 1)
        if self.is_symmetric and any((stored == each).all() for each in (middle - 1, middle)):
            return np.full_like(stored, middle)
        # The largest number stored is zero less one (AutoGPTQ masks it, too).
        return (stored + self.one_less) & (2**bits - 1)


_BITS = 4
# The place of each of eight columns in a word, which has columns 0, 2, 4, 6, 1, 3, 5, 7.
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


@final
@dataclass(frozen=True, kw_only=True)
class AWQ:
    """The `Method` of AWQ folders."""

    group: int  # number of inputs that share a scale; -1 for all

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read `quantization_config`; raise UnsupportedModelError for other bits or layouts."""
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
