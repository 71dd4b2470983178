"""Sources of checkpoint tensors, and a notation for how tensors fill a parameter.

A parameter's axes have one-letter names. `Weight("e k x d", ...)` is a fused query, key and value
projection, and `Tensor("q_proj.weight", "(k x d) e", x=slice(0, 4))` says that rows of this tensor
run over KV heads, then x, then head_dim, its columns over e, and that it fills the first four of x.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np


class WeightSource(Protocol):
    """The tensors of a checkpoint by Hugging Face name, in PyTorch's orientation ([out, in]).

    `where` names the checkpoint in error messages.
    """

    where: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor in the checkpoint; reads headers only."""
        ...

    def dtypes(self) -> Mapping[str, str]:
        """Return the stored type of every tensor by the format's name of it, such as "BF16"."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or its part at `index` (unit steps), in its stored or dequantised dtype.

        Raises:
          CheckpointError: the data cannot be read.
        """
        ...


Range = tuple[int, int]


@final
class Tensor:
    """One checkpoint tensor and the part of a parameter that it fills.

    Args:
      layout: the parameter's axes in the tensor's order, major first; axes in parentheses share a
        dimension, and `()` is one of size 1. Of an axis that is not named, the tensor fills one
        place.
      order: by axis, the place in the tensor of each place in the parameter; in order by default.
      rows: the first row of this part in the tensor, and the number of rows of the tensor; by
        default the part is all of it.
      part: by axis, the range or the one place that the tensor fills; the whole axis by default.
    """

    def __init__(
        self,
        name: str,  # the name in the checkpoint; `{layer}` stands for the number of the layer
        layout: str,
        *,
        order: Mapping[str, Sequence[int] | np.ndarray] | None = None,
        rows: tuple[int, int] | None = None,
        **part: slice | int,
    ):
        self.name = name
        self._rows = rows
        self.groups = [tuple(g.strip("()").split()) for g in re.findall(r"\([^)]*\)|\w+", layout)]
        self._order = {axis: np.asarray(places) for axis, places in (order or {}).items()}
        self._part = part

    def ranges(self, sizes: Mapping[str, int]) -> dict[str, Range]:
        """Return the range that the tensor fills along each axis of a parameter of these sizes."""
        filled = {axis: (0, size) for axis, size in sizes.items()}
        for axis, part in self._part.items():
            first, last, _ = (
                (part, part + 1, 1) if isinstance(part, int) else part.indices(sizes[axis])
            )
            filled[axis] = (first, last)
        return filled

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        spans = {axis: last - first for axis, (first, last) in self.ranges(sizes).items()}
        shape = tuple(math.prod(spans[axis] for axis in group) for group in self.groups)
        return shape if self._rows is None else (self._rows[1], *shape[1:])

    def factors(self, summed: Collection[str]) -> tuple[Tensor, Tensor] | None:
        """Return the tensors A [rank, in] and B [out, rank] of a low-rank change of this one.

        Their names are PEFT's, and the axis `rank` is also the parameter's. `summed` has the
        parameter's axes that a product sums over. None if this tensor is not one matrix, with these
        axes in one dimension.
        """
        inner = [group for group in self.groups if set(group) <= set(summed)]
        outer = [group for group in self.groups if set(group).isdisjoint(summed)]
        if len(inner) != 1 or len(outer) != 1 or len(self.groups) != 2:
            return None
        module = self.name.removesuffix(".weight")

        def factor(letter: str, layout: str, *, is_inner: bool) -> Tensor:
            order = {axis: own for axis, own in self._order.items() if (axis in summed) == is_inner}
            part = {axis: own for axis, own in self._part.items() if (axis in summed) == is_inner}
            rows = None if is_inner else self._rows
            return Tensor(f"{module}.lora_{letter}.weight", layout, order=order, rows=rows, **part)

        a = factor("A", f"rank ({' '.join(inner[0])})", is_inner=True)
        return a, factor("B", f"({' '.join(outer[0])}) rank", is_inner=False)

    def read(
        self, source: WeightSource, name: str, sizes: Mapping[str, int], wanted: Mapping[str, Range]
    ) -> np.ndarray:
        """Return the part `wanted` of the parameter, in the parameter's order of axes.

        Of each dimension, reads one contiguous piece, cut along the major axis.
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
            if not group:
                index.append(slice(0, 1))
                continue
            major, *minor = group
            first, last = (0, spans[major]) if major in self._order else inside[major]
            stride = math.prod(spans[axis] for axis in minor)
            start = self._rows[0] if self._rows and not index else 0
            index.append(slice(start + first * stride, start + last * stride))
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

    def write(self, out: np.ndarray, parameter: np.ndarray, sizes: Mapping[str, int]) -> None:
        """Fill this part of the tensor from the whole parameter: the inverse of `read`."""
        filled = self.ranges(sizes)
        spans = {axis: last - first for axis, (first, last) in filled.items()}
        named = [axis for group in self.groups for axis in group]
        own = [axis for axis in sizes if axis in named]
        x = parameter[tuple(slice(*filled[axis]) for axis in sizes)]
        x = x.reshape([spans[axis] for axis in own])
        x = x.transpose([own.index(axis) for axis in named])
        for place, axis in enumerate(named):
            if axis in self._order:
                x = np.take(x, np.argsort(self._order[axis]), place)
        x = x.reshape([math.prod(spans[axis] for axis in group) for group in self.groups])
        first = 0 if self._rows is None else self._rows[0]
        out[first : first + len(x)] = x


@final
@dataclass(frozen=True)
class Weight:
    """A parameter and the checkpoint tensors that fill it; `axes` names its axes, in order."""

    axes: str
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, name: str, axes: str = "e", layout: str | None = None) -> Weight:
        """Return the weight that one tensor fills, laid out like the parameter by default."""
        return cls(axes, (Tensor(name, layout or axes),))

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.axes.split(), shape, strict=True))

    def needed(self, shape: Sequence[int], **place: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the tensors in the checkpoint; `place` completes the names."""
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

    def write(
        self,
        parameter: np.ndarray,
        tensor_at: Callable[[str, tuple[int, ...]], np.ndarray],
        **place: int,
    ) -> None:
        """Fill the tensors, which `tensor_at` returns by name and shape, from the parameter."""
        sizes = self.sizes(parameter.shape)
        for tensor in self.tensors:
            out = tensor_at(tensor.name.format(**place), tensor.shape(sizes))
            tensor.write(out, parameter, sizes)


def split_qkv(
    prefix: str,
    kind: str,
    group: int,
    *,
    order: Mapping[str, Sequence[int]] | None = None,
    has_gate: bool = False,
) -> Weight:
    """Return the fused projection of `Attention` from `{prefix}q_proj.{kind}`, k_proj and v_proj.

    `order` is the order of queries and keys in the checkpoint, if it differs from values'. With
    `has_gate`, each query's rows of q_proj are followed by those of its gate.
    """
    axes, rest = ("e k x d", " e") if kind == "weight" else ("k x d", "")
    num_queries = 2 * group if has_gate else group
    orders = {"q": order, "k": order, "v": None}
    if has_gate:  # gates come first in the parameter
        orders["q"] = {**(order or {}), "x": [*range(1, 2 * group, 2), *range(0, 2 * group, 2)]}
    parts = {
        "q": slice(0, num_queries),
        "k": slice(num_queries, num_queries + 1),
        "v": slice(num_queries + 1, num_queries + 2),
    }
    return Weight(
        axes,
        tuple(
            Tensor(f"{prefix}{letter}_proj.{kind}", f"(k x d){rest}", order=orders[letter], x=part)
            for letter, part in parts.items()
        ),
    )


def neighbours(rotated: int, head_dim: int) -> dict[str, list[int]]:
    """Return the order of `split_qkv` for checkpoints that rotate neighbouring dimensions.

    Ours are half of the rotated part apart. The same order in queries and keys does not change
    their products.
    """
    pairs = [*range(0, rotated, 2), *range(1, rotated, 2)]
    return {"d": [*pairs, *range(rotated, head_dim)]}


def fused_qkv(name: str, kind: str, *, num_kv_heads: int, group: int, head_dim: int) -> Weight:
    """Return the fused projection of `Attention` from one tensor of all queries, keys and values.

    They follow each other. `kind` is "weight" or "bias".
    """
    axes, layout = ("e k x d", "(k x d) e") if kind == "weight" else ("k x d", "(k x d)")
    row = num_kv_heads * head_dim
    parts = (slice(0, group), slice(group, group + 1), slice(group + 1, group + 2))
    return Weight(
        axes,
        tuple(
            Tensor(name, layout, rows=(part.start * row, (group + 2) * row), x=part)
            for part in parts
        ),
    )


def layer_norm(path: str, name: str) -> dict[str, Weight]:
    """Return both parameters of a `LayerNorm` at `path`, from the tensors of `name`."""
    return {f"{path}.scale": Weight.of(f"{name}.weight"), f"{path}.bias": Weight.of(f"{name}.bias")}


def two_layer_mlp(path: str, up: str, down: str) -> dict[str, Weight]:
    """Return the parameters of a `TwoLayerMLP` at `path`, from the tensors of two modules."""
    return {
        f"{path}.up": Weight.of(f"{up}.weight", "e m", "m e"),
        f"{path}.bup": Weight.of(f"{up}.bias", "m"),
        f"{path}.down": Weight.of(f"{down}.weight", "m e", "e m"),
        f"{path}.bdown": Weight.of(f"{down}.bias"),
    }


def gated_mlp(
    path: str, mlp: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Weight]:
    """Return the parameters of a `GatedMLP` at `path`; `mlp` begins the names of its modules."""
    gate, up, down = (mlp + name for name in names)
    return {
        f"{path}.gate_up": gate_and_up(f"{gate}.weight", f"{up}.weight", "weight"),
        f"{path}.bgate_up": gate_and_up(f"{gate}.bias", f"{up}.bias", "bias"),
        f"{path}.down": Weight.of(f"{down}.weight", "m e", "e m"),
        f"{path}.bdown": Weight.of(f"{down}.bias"),
    }


def gate_and_up(gate: str, up: str, kind: str) -> Weight:
    """Return the fused projection of `GatedMLP`, from two tensors."""
    axes, layout = ("e u m", "m e") if kind == "weight" else ("u m", "m")
    return Weight(axes, (Tensor(gate, layout, u=0), Tensor(up, layout, u=1)))
