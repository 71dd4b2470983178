"""How checkpoint tensors fill a parameter: notation, and reading any part of it.

A parameter's axes have one-letter names. `Weight("e k x d", ...)` is a fused query, key and value
projection, and `Tensor("q_proj.weight", "(k x d) e", x=slice(0, 4))` says that rows of this tensor
run over KV heads, then x, then head_dim, its columns over e, and that it fills the first four of x.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.models.source import WeightSource

Range = tuple[int, int]


@final
class Tensor:
    """One checkpoint tensor and the part of a parameter that it fills.

    Args:
      name: in the checkpoint; `{layer}` stands for the layer.
      layout: the parameter's axes as they lie in the tensor, major first; those in parentheses
        share a dimension. Axes that are not named have a part of one.
      order: axis -> for each place along it, where that is in the tensor; in order by default.
      part: axis -> the range or the one place of it that the tensor fills; all of it by default.
    """

    def __init__(
        self,
        name: str,
        layout: str,
        *,
        order: Mapping[str, Sequence[int]] | None = None,
        **part: slice | int,
    ):
        self.name = name
        self.groups = [tuple(g.strip("()").split()) for g in re.findall(r"\([^)]*\)|\w+", layout)]
        self._order = {axis: np.asarray(places) for axis, places in (order or {}).items()}
        self._part = part

    def ranges(self, sizes: Mapping[str, int]) -> dict[str, Range]:
        """What it fills along each axis of a parameter with these sizes."""
        filled = {axis: (0, size) for axis, size in sizes.items()}
        for axis, part in self._part.items():
            first, last, _ = (
                (part, part + 1, 1) if isinstance(part, int) else part.indices(sizes[axis])
            )
            filled[axis] = (first, last)
        return filled

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """That it must have in the checkpoint."""
        spans = {axis: last - first for axis, (first, last) in self.ranges(sizes).items()}
        return tuple(math.prod(spans[axis] for axis in group) for group in self.groups)

    def read(
        self,
        source: WeightSource,
        name: str,
        sizes: Mapping[str, int],
        wanted: Mapping[str, Range],
    ) -> np.ndarray:
        """The part `wanted` of what it fills, in the parameter's order of axes.

        Only a contiguous piece a dimension is read, cut along its major axis.
        """
        filled = self.ranges(sizes)
        spans = {axis: last - first for axis, (first, last) in filled.items()}
        # Ranges inside the tensor.
        inside = {
            axis: (wanted[axis][0] - first, wanted[axis][1] - first)
            for axis, (first, _) in filled.items()
        }
        index, shape, cuts = [], [], []
        for group in self.groups:
            major, *minor = group
            first, last = (0, spans[major]) if major in self._order else inside[major]
            stride = math.prod(spans[axis] for axis in minor)
            index.append(slice(first * stride, last * stride))
            shape += [last - first, *(spans[axis] for axis in minor)]
            cuts += [slice(None), *(slice(*inside[axis]) for axis in minor)]
        whole = [(i.start, i.stop) for i in index] == [(0, n) for n in self.shape(sizes)]
        x = source.read(name, None if whole else tuple(index)).reshape(shape)
        named = [axis for group in self.groups for axis in group]
        for place, axis in enumerate(named):
            if axis in self._order:
                x = np.take(x, self._order[axis][slice(*inside[axis])], place)
                cuts[place] = slice(None)
        x = x[tuple(cuts)]
        x = x.transpose([named.index(axis) for axis in sizes if axis in named])
        return x.reshape([wanted[axis][1] - wanted[axis][0] for axis in sizes])


@final
@dataclass(frozen=True)
class Weight:
    """A parameter as its checkpoint tensors fill it.

    Attributes:
      axes: names of its axes, in order.
    """

    axes: str
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, name: str, axes: str = "e", layout: str | None = None) -> Weight:
        """From one tensor, laid out like the parameter by default."""
        return cls(axes, (Tensor(name, layout or axes),))

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.axes.split(), shape, strict=True))

    def needed(self, shape: Sequence[int], **place: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of its tensors in the checkpoint; `place` fills in their names."""
        for tensor in self.tensors:
            yield tensor.name.format(**place), tensor.shape(self.sizes(shape))

    def read_into(
        self,
        out: np.ndarray,
        source: WeightSource,
        shape: Sequence[int],
        index: Sequence[slice],
        **place: int,
    ) -> None:
        """Fill `out` with the part at `index` (unit steps) of the parameter of this `shape`."""
        sizes = self.sizes(shape)
        shard = {
            axis: part.indices(size)[:2]
            for (axis, size), part in zip(sizes.items(), index, strict=True)
        }
        for tensor in self.tensors:
            wanted = {
                axis: (max(first, shard[axis][0]), min(last, shard[axis][1]))
                for axis, (first, last) in tensor.ranges(sizes).items()
            }
            if any(first >= last for first, last in wanted.values()):
                continue
            target = tuple(
                slice(first - shard[axis][0], last - shard[axis][0])
                for axis, (first, last) in wanted.items()
            )
            out[target] = tensor.read(source, tensor.name.format(**place), sizes, wanted)


def split_qkv(
    prefix: str, kind: str, group: int, *, order: Mapping[str, Sequence[int]] | None = None
) -> Weight:
    """The fused projection of `Attention` from `{prefix}q_proj.{kind}`, k_proj and v_proj.

    `order` is that of queries and keys, where they lie in another than values do.
    """
    axes, rest = ("e k x d", " e") if kind == "weight" else ("k x d", "")
    parts = {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, group + 2)}
    return Weight(
        axes,
        tuple(
            Tensor(
                f"{prefix}{letter}_proj.{kind}",
                f"(k x d){rest}",
                order=None if letter == "v" else order,
                x=part,
            )
            for letter, part in parts.items()
        ),
    )


def layer_norm(path: str, name: str) -> dict[str, Weight]:
    """Both parameters of a `LayerNorm` at `path` from the tensors of `name`."""
    return {
        f"{path}.scale": Weight.of(f"{name}.weight"),
        f"{path}.bias": Weight.of(f"{name}.bias"),
    }


def gate_and_up(gate: str, up: str, kind: str) -> Weight:
    """The fused projection of `GatedMLP` from two tensors."""
    axes, layout = ("e u m", "m e") if kind == "weight" else ("u m", "m")
    return Weight(axes, (Tensor(gate, layout, u=0), Tensor(up, layout, u=1)))
