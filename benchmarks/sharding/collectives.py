"""The collectives of compiled steps, read from their HLO."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any, final

_OP = re.compile(
    r"= (?P<shapes>[^=]*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r"(?P<rest>.*)"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,]*)\]")
_BITS = {"pred": 8}


@final
@dataclass(frozen=True)
class Collective:
    """One operation between devices.

    Attributes:
      kind: its name in HLO, e.g. "all-reduce".
      shapes: of its results on one device.
      num_bytes: of these results.
      in_branch: whether it lies in a branch of a `lax.cond`, and so runs in some steps only.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    in_branch: bool


def collectives_of(executable: Any) -> list[Collective]:
    """Return the collectives of a compiled function, each once, also inside a loop."""
    return [_collective(match) for match in _OP.finditer(executable.as_text())]


def summary(collectives: list[Collective]) -> dict[str, Any]:
    """Return the number of each kind and the bytes of all, without those in branches."""
    collectives = [each for each in collectives if not each.in_branch]
    return {
        "count": dict(Counter(each.kind for each in collectives)),
        "bytes": sum(each.num_bytes for each in collectives),
    }


def _collective(match: re.Match[str]) -> Collective:
    shapes, num_bytes = [], 0
    for shape in _SHAPE.finditer(match["shapes"]):
        sizes = tuple(int(size) for size in shape["sizes"].split(",") if size)
        shapes.append(sizes)
        digits = re.search(r"\d+", shape["dtype"])
        bits = int(digits[0]) if digits else _BITS[shape["dtype"]]
        num_bytes += prod(sizes) * bits // 8
    return Collective(match["kind"], tuple(shapes), num_bytes, "/cond/branch" in match["rest"])
