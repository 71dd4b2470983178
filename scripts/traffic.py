"""Functions that count, in HLO text, what a compiled step reads, writes and multiplies on a GPU.

The entry's parameters say what they are by their names, which are those of the arguments of
`Programs`: `params`, `cache`, and the state of slots and plans. What is computed from several of
these is an activation; what is made of weights, pages or states alone is a copy of them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

Kind = Literal["weight", "copy", "pages", "state", "activation"]

# Instructions that read and write nothing; their result is that of their operand.
_VIEWS = {"bitcast", "opt-barrier"}
# Instructions that read only what they return of their first operand.
_SLICES = {"slice", "dynamic-slice", "gather"}
# Instructions that write to their first operand in place, with the index of what they write.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Starts of collectives, whose result may be a tuple of operands and results.
_COLLECTIVES = {"all-gather-start", "all-reduce-start", "collective-permute-start"}
# Our kernels that multiply their first operand, [tokens, in], with their second one.
_PRODUCTS = ("fused_matmul", "grouped_matmul", "rowwise_product")
# In the line of a fusion of slices with the kernel that takes them: it gets their addresses.
_KERNEL_ON_SLICES = '"name":"dynamic_slice_fusion"'
# Sizes of kernel parameters that are not data, such as the number of the layer.
_SCALAR_BYTES = 8


@final
@dataclass(frozen=True)
class _Value:
    """An array in memory; a weight has its parameter's name."""

    kind: Kind
    num_bytes: float
    weight: str = ""


@final
@dataclass
class _Traffic:
    """Bytes of weights that are read in place, by name, and of all other arrays by kind."""

    reads: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    others: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return sum(self.reads.values()) + sum(self.others.values())

    def move(self, value: _Value, num_bytes: float) -> None:
        if value.kind == "weight":
            self.reads[value.weight] += num_bytes
        else:
            self.others[value.kind] += num_bytes

    def add(self, other: _Traffic, times: int = 1) -> None:
        for mine, theirs in ((self.reads, other.reads), (self.others, other.others)):
            for key, num_bytes in theirs.items():
                mine[key] += times * num_bytes


@final
@dataclass(frozen=True)
class _Instruction:
    """A line of a computation, with the bytes of each array of its result."""

    name: str
    opcode: str
    shapes: Sequence[float]
    operands: Sequence[tuple[str, int | None]]
    line: str
    is_root: bool


@final
@dataclass(frozen=True)
class StepBytes:
    """The known bytes that one step moves between memory and multiprocessors.

    Loops of unknown length count once, branches with their largest one. What kernels read and write
    of the pages depends on the contexts, and is not included.

    Attributes:
      weights: of the weights that the step needs, each once.
      activations: of computed values.
      beside: all other bytes: copies of weights, weights that are read again, pages that are moved
        by instructions other than kernels, and the state of slots and plans.
    """

    weights: int
    activations: int
    beside: int

    @property
    def share_beside(self) -> float:
        """`beside` as a share of the bytes of the weights."""
        return self.beside / self.weights


def step_bytes(hlo: str) -> StepBytes:
    """Count the bytes of a scheduled module whose entry has the arguments of a step."""
    module = _Module(hlo)
    entry = module.computations[module.entry]
    given = {each.name: each for each in entry if each.opcode == "parameter"}
    arguments = [[_argument(each)] for each in sorted(given.values(), key=_number)]
    _, traffic = module.run(module.entry, arguments)
    sizes = {name: sum(each.shapes) for name, each in given.items()}
    weights = sum(min(read, sizes[name]) for name, read in traffic.reads.items())
    again = sum(max(0.0, read - sizes[name]) for name, read in traffic.reads.items())
    beside = again + sum(traffic.others[kind] for kind in ("copy", "pages", "state"))
    return StepBytes(int(weights), int(traffic.others["activation"]), int(beside))


def product_flops(hlo: str) -> int:
    """Count the operations of a module's products of matrices, two for a multiply-add.

    Products are those of XLA, of its libraries and of our kernels for whole weights; attention does
    not count. Bodies of loops count once. What a kernel computes for the empty rows of its tiles
    does not count.

    Raises:
      ValueError: the contracted axes of a library's product are unknown.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0
    for line in hlo.splitlines():
        made = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?[\])}]) ([a-z][\w-]*)\((.*)", line)
        if made is None:
            continue
        arrays = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]", made[2])
        if not arrays:
            continue
        out = shapes[made[1]] = tuple(int(each) for each in arrays[0].split(",") if each)
        operands = re.findall(r"%([\w.-]+)", made[4].split("), ")[0])
        if (kernel := re.search(rf'name = "({"|".join(_PRODUCTS)})"', line)) is not None:
            x, weight = (shapes[name] for name in operands[:2])
            matrices = weight[0] if kernel[1] == "grouped_matmul" else 1
            total += 2 * x[0] * math.prod(weight) // matrices
        elif made[3] == "dot" or "__cublas" in line:
            axes = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]+)', line)
            if axes is None:
                raise ValueError(f"no contracted axes in {line.strip()[:200]!r}")
            left = shapes[operands[0]]
            summed = (left[int(axis)] for axis in axes[1].replace('"', "").split(","))
            total += 2 * math.prod(out) * math.prod(summed)
    return total


def _argument(parameter: _Instruction) -> _Value:
    name = parameter.name
    # A partitioned module has other names, and these in its metadata.
    if (given := re.search(r'op_name="([^"]+)"', parameter.line)) is not None:
        name = given[1]
    if name.startswith("params"):
        return _Value("weight", sum(parameter.shapes), parameter.name)
    return _Value("pages" if name.startswith("cache") else "state", sum(parameter.shapes))


def _number(parameter: _Instruction) -> int:
    found = re.search(r"parameter\((\d+)\)", parameter.line)
    assert found is not None
    return int(found[1])


@final
class _Module:
    """The computations of a module, by name."""

    def __init__(self, hlo: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = ""
        current: list[_Instruction] = []
        for line in hlo.splitlines():
            if begin := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
                current = self.computations[begin[2]] = []
                self.entry = begin[2] if begin[1] else self.entry
            elif (instruction := _instruction(line)) is not None:
                current.append(instruction)

    def run(
        self, name: str, arguments: Sequence[Sequence[_Value]]
    ) -> tuple[Sequence[_Value], _Traffic]:
        traffic = _Traffic()
        values: dict[str, Sequence[_Value]] = {}
        result: Sequence[_Value] = ()
        for each in self.computations[name]:
            if each.opcode == "parameter":
                result = values[each.name] = arguments[_number(each)]
            else:
                operands = [
                    values[operand] if index is None else [values[operand][index]]
                    for operand, index in each.operands
                ]
                result = values[each.name] = self._result(each, operands, traffic)
            if each.is_root:
                return result, traffic
        return result, traffic

    def _result(
        self, each: _Instruction, operands: Sequence[Sequence[_Value]], traffic: _Traffic
    ) -> Sequence[_Value]:
        line = each.line
        if each.opcode == "tuple":
            return [value for operand in operands for value in operand]
        if each.opcode == "get-tuple-element":
            return [operands[0][int(_attribute(line, ", index"))]]
        if each.opcode in _VIEWS or each.opcode.endswith("-done"):
            return operands[0]
        if each.opcode == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for part in ("condition", "body"):
                _, inner = self.run(_attribute(line, part), [operands[0]])
                traffic.add(inner, int(trips[1]) if trips else 1)
            return operands[0]
        if each.opcode == "conditional":
            return self._largest_branch(line, operands, traffic)
        if each.opcode in ("call", "async-start"):
            inner = _attribute(line, "to_apply" if each.opcode == "call" else "calls")
            result, moved = self.run(inner, operands)
            traffic.add(moved)
            return result
        if each.opcode == "constant" or not each.shapes:
            return [_Value("activation", size) for size in each.shapes]
        empty = [each.operands[i][0] for i, operand in enumerate(operands) if not operand]
        if empty:
            raise ValueError(f"{empty} have no result, in {line.strip()[:200]!r}")
        if each.opcode == "fusion" and _KERNEL_ON_SLICES in line:
            return self._on_slices(_attribute(line, "calls"), operands, traffic)
        flat = [operand[0] for operand in operands]
        if each.opcode == "custom-call":
            return _kernel(each, flat, traffic)
        return self._moved(each, flat, traffic)

    def _on_slices(
        self, name: str, operands: Sequence[Sequence[_Value]], traffic: _Traffic
    ) -> Sequence[_Value]:
        """Return the result of a kernel that reads slices of its operands in place."""
        values: dict[str, Sequence[_Value]] = {}
        result: Sequence[_Value] = ()
        for each in self.computations[name]:
            if each.opcode == "parameter":
                result = operands[_number(each)]
            elif each.opcode in ("slice", "dynamic-slice"):
                (source,) = values[each.operands[0][0]]
                result = [replace(source, num_bytes=sum(each.shapes))]
            elif each.opcode in _UPDATES:
                result = values[each.operands[0][0]]
            else:
                given = [
                    values[operand] if index is None else [values[operand][index]]
                    for operand, index in each.operands
                ]
                result = self._result(each, given, traffic)
            values[each.name] = result
            if each.is_root:
                break
        return result

    def _largest_branch(
        self, line: str, operands: Sequence[Sequence[_Value]], traffic: _Traffic
    ) -> Sequence[_Value]:
        names = re.findall(r"(?:true|false)_computation=%?([\w.-]+)", line)
        if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
            names = re.findall(r"[\w.-]+", branches[1])
        ran = [self.run(name, [operand]) for name, operand in zip(names, operands[1:], strict=True)]
        result, largest = max(ran, key=lambda each: each[1].total)
        traffic.add(largest)
        return result

    def _moved(
        self, each: _Instruction, operands: Sequence[_Value], traffic: _Traffic
    ) -> Sequence[_Value]:
        if each.opcode in ("fusion", "fusion-start"):
            inner = self.computations[_attribute(each.line, "calls")]
            by_number = {_number(one): one.name for one in inner if one.opcode == "parameter"}
            names = [by_number[number] for number in range(len(operands))]
            roots = _roots(inner)
        else:
            names = [f"operand {number}" for number in range(len(operands))]
            inner = roots = [replace(each, operands=[(name, None) for name in names])]
        for name, operand in zip(names, operands, strict=True):
            traffic.move(operand, min(_num_read(inner, name), operand.num_bytes))
        if len(roots) == 1:  # also of an instruction that returns several arrays
            roots = roots * len(each.shapes)
        kinds: set[Kind] = {
            operand.kind for operand in operands if operand.num_bytes > _SCALAR_BYTES
        }
        by_name = dict(zip(names, operands, strict=True))
        results = []
        for root, size in zip(roots, each.shapes, strict=True):
            value, written = _Value(_kind_of(kinds), size), size
            if root.opcode in _UPDATES:
                value = by_name.get(_target(inner, root), value)
                update = root.operands[_UPDATES[root.opcode]][0]
                written = by_name[update].num_bytes if update in by_name else _size(inner, update)
            traffic.move(value, written)
            results.append(value)
        return results


def _kernel(each: _Instruction, operands: Sequence[_Value], traffic: _Traffic) -> Sequence[_Value]:
    """Return a kernel's result; it may write to operands in place, and pages are not counted."""
    targets: dict[int, int] = {}
    if found := re.search(r"output_to_operand_aliasing=\{(.*?\))\}", each.line):
        for output, operand in re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", found[1]):
            targets[int(output or 0)] = int(operand)
    results = [
        operands[targets[i]] if i in targets else _Value("activation", size)
        for i, size in enumerate(each.shapes)
    ]
    read = [value for i, value in enumerate(operands) if i not in targets.values()]
    for value in (*read, *results):
        if value.kind != "pages":
            traffic.move(value, value.num_bytes)
    return results


def _kind_of(kinds: set[Kind]) -> Kind:
    """Return the kind of a value made of arrays of these kinds alone."""
    if kinds and kinds <= {"weight", "copy"}:
        return "copy"
    return next(iter(kinds)) if len(kinds) == 1 else "activation"


def _num_read(instructions: Sequence[_Instruction], name: str) -> float:
    """Return the bytes that instructions read of an array, which may exceed its size."""
    total = 0.0
    for each in instructions:
        for place, (operand, _) in enumerate(each.operands):
            if operand != name:
                continue
            if each.opcode in ("bitcast", "tuple"):
                total += _num_read(instructions, each.name)
            elif each.opcode in _SLICES and place == 0:
                total += sum(each.shapes)
            elif not (each.opcode in _UPDATES and place == 0):
                return math.inf
    return total


def _roots(instructions: Sequence[_Instruction]) -> list[_Instruction]:
    by_name = {each.name: each for each in instructions}
    (root,) = (each for each in instructions if each.is_root)
    names = [name for name, _ in root.operands] if root.opcode == "tuple" else [root.name]
    found = []
    for name in names:
        while by_name[name].opcode == "bitcast":
            name = by_name[name].operands[0][0]
        found.append(by_name[name])
    return found


def _target(instructions: Sequence[_Instruction], update: _Instruction) -> str:
    by_name = {each.name: each for each in instructions}
    name = update.operands[0][0]
    while name in by_name and by_name[name].opcode == "bitcast":
        name = by_name[name].operands[0][0]
    return name


def _size(instructions: Sequence[_Instruction], name: str) -> float:
    return next(sum(each.shapes) for each in instructions if each.name == name)


def _attribute(line: str, name: str) -> str:
    found = re.search(rf"(?<![\w*]){name}=%?([\w.-]+)", line)
    if found is None:
        raise ValueError(f"no {name}= in {line.strip()[:120]!r}")
    return found[1]


def _instruction(line: str) -> _Instruction | None:
    made = re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*?[\])}]) ([a-z][\w-]*)\((.*)", line)
    if made is None:
        return None
    arguments, depth = "", 1
    for letter in made[5]:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            break
        arguments += letter
    operands = [
        (name, int(index) if index else None)
        for name, index in re.findall(r"%([\w.-]+)(?:#(\d+))?", arguments)
    ]
    arrays = re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", made[3])
    shapes = [
        math.prod(int(each) for each in dimensions.split(",") if each) * int(bits or 8) / 8
        for _, bits, dimensions in arrays
    ]
    if made[4] in _COLLECTIVES and made[3].startswith("("):  # operands, results
        shapes = shapes[len(operands) : 2 * len(operands)]
    elif made[3].startswith("(("):  # of an asynchronous instruction: operands, result, context
        shapes = shapes[len(operands) : -1]
    elif made[4] == "copy-start":  # result, operand, context
        shapes = shapes[:1]
    return _Instruction(made[2], made[4], shapes, operands, line, is_root=bool(made[1]))
