"""Functions that read what a compiled module launches on a GPU, and what its host does meanwhile.

Launches are counted in HLO text, and the host's part in XLA's dump of the module's thunks. A
command buffer is a CUDA graph: the host launches it, and the device runs its contents, including
loops and their conditions. The host decides a loop outside of a command buffer: after every
iteration it waits for the device and reads the predicate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

# Instructions that launch no kernel: they name, group or view values. An asynchronous instruction
# counts at its start.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "replica-id"),
}
# Instructions that run the computations that they name.
_GROUPS = {"while", "call", "conditional"}

# XLA writes this file last, after it has put thunks into command buffers.
PATTERN = "*thunk_sequence_after_thunk_passes.txt"

_THUNK = re.compile(r"^(\s*)\d+: k(\w+)")
_BUFFER = "CommandBuffer"
_DECIDED = ("While", "Conditional")


@final
@dataclass
class _Computation:
    """A computation: the number of its launches, and the computations that it runs.

    `inner` has their names, each with the number of runs, or None if XLA does not know it.
    """

    num_launches: int = 0
    inner: list[tuple[str, int | None]] = field(default_factory=list)


def launches(hlo: str) -> int:
    """Count the kernels, library calls and copies of a scheduled module; loop bodies count once."""
    computations, entry = _read(hlo)
    return _total(computations, entry)


def launches_a_layer(hlo: str, num_layers: int) -> int:
    """Count the launches in the body of the loop that runs `num_layers` times.

    Raises:
      ValueError: the module has no such loop, or several.
    """
    computations, _ = _read(hlo)
    bodies = [
        name
        for computation in computations.values()
        for name, trips in computation.inner
        if trips == num_layers
    ]
    if len(bodies) != 1:
        raise ValueError(f"{len(bodies)} loops run {num_layers} times; expected one, over layers")
    return _total(computations, bodies[0])


def made_arrays(hlo: str, sizes: AbstractSet[int], dtype: str = r"\w+") -> list[str]:
    """Return the instructions that write an array with as many elements as one of `sizes`.

    Instructions inside fusions, views and kernels do not count. `dtype` is a pattern of the arrays'
    dtypes, in HLO's names.
    """
    fused = set(re.findall(r"calls=%?([\w.-]+)", hlo))
    found, is_fused = [], False
    for line in hlo.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            is_fused = begin[1] in fused
        made = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?[\])}]) ([a-z][\w-]*)\(", line)
        if made is None or is_fused or made[2] in {*_FREE, *_GROUPS, "custom-call"}:
            continue
        arrays = re.findall(rf"\b{dtype}\[([\d,]+)\]", made[1])
        if sizes & {math.prod(map(int, array.split(","))) for array in arrays}:
            found.append(" ".join(line.split())[:200])
    return found


def sums_of_floats(hlo: str) -> list[str]:
    """Return the instructions by which XLA itself adds floating-point numbers.

    These are matrix products, including those of libraries, and reductions by addition, including
    those inside fusions. Our own kernels do not count, and neither do scatters: those of steps add
    ones, or one number to a logit.
    """
    adds, computation = set(), ""
    for line in hlo.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = begin[1]
        elif re.match(r"\s+ROOT %?[\w.-]+ = (?:bf16|f\d+)\[\](?:\{\})? add\(", line):
            adds.add(computation)
    found = []
    for line in hlo.splitlines():
        made = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?[\])}]) ([a-z][\w-]*)\(", line)
        if made is None:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', line)
        is_product = made[2] in ("dot", "ragged-dot", "convolution") or (
            target is not None and re.search(r"gemm|cublas|cudnn|matmul", target[1].lower())
        )
        applied = re.search(r"to_apply=%?([\w.-]+)", line)
        is_sum = made[2] not in {*_GROUPS, "scatter"} and applied is not None and applied[1] in adds
        is_float = re.search(r"\b(?:bf16|f\d+)\w*\[", made[1])
        if is_float and (is_product or is_sum):
            found.append(" ".join(line.split())[:200])
    return found


def _total(computations: dict[str, _Computation], name: str) -> int:
    own = computations[name]
    return own.num_launches + sum(_total(computations, inner) for inner, _ in own.inner)


def _read(hlo: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    current, entry = _Computation(), ""
    for line in hlo.splitlines():
        if begin := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = computations[begin[2]] = _Computation()
            entry = begin[2] if begin[1] else entry
        elif instruction := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = .*?[\])}] ([a-z][\w-]*)\(", line):
            opcode = instruction[1]
            if opcode in _GROUPS:
                current.inner += _inner(line)
            elif opcode not in _FREE and not opcode.endswith("-done"):
                current.num_launches += 1
    return computations, entry


def _inner(line: str) -> list[tuple[str, int | None]]:
    """Return the computations that an instruction runs, except the condition of a counted loop."""
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    kinds = "body|to_apply|true_computation|false_computation" + ("" if trips else "|condition")
    names = re.findall(rf"(?:{kinds})=%?([\w.-]+)", line)
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
        names += re.findall(r"[\w.-]+", branches)
    return [(name, int(trips[1]) if trips else None) for name in names]


@final
@dataclass(frozen=True, kw_only=True)
class HostThunks:
    """What the host does for one run of a module; bodies of loops count once.

    Attributes:
      decisions: loops and branches whose predicates it reads.
      launches: thunks that it launches one by one.
      graphs: command buffers that it launches.
      recorded: thunks in command buffers, which the device runs without the host.
    """

    decisions: int
    launches: int
    graphs: int
    recorded: int


def host_thunks(text: str) -> HostThunks:
    """Count the thunks of a dump; raises ValueError if it has none."""
    counts = dict.fromkeys(("decisions", "launches", "graphs", "recorded"), 0)
    buffer: int | None = None  # indentation of the command buffer that the line is in
    for line in text.splitlines():
        found = _THUNK.match(line)
        if found is None:
            continue
        indentation, kind = len(found[1]), found[2]
        if buffer is not None and indentation <= buffer:
            buffer = None
        if buffer is not None:
            counts["recorded"] += 1
        elif kind == _BUFFER:
            counts["graphs"] += 1
            buffer = indentation
        elif kind in _DECIDED:
            counts["decisions"] += 1
        else:
            counts["launches"] += 1
    if not any(counts.values()):
        raise ValueError("the dump has no thunks")
    return HostThunks(**counts)


def newest_dump(folder: Path, function: str) -> str:
    """Return XLA's thunk dump of the function that was compiled last under a name.

    Raises:
      FileNotFoundError: no such dump exists.
    """
    dumps = [path for path in folder.glob(PATTERN) if f".jit_{function}." in path.name]
    if not dumps:
        raise FileNotFoundError(f"no dump of the thunks of {function} in {folder}")
    return max(dumps, key=lambda path: int(re.findall(r"module_(\d+)", path.name)[0])).read_text()
