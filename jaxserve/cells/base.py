"""The base class of cells: binding of inputs, chains and trees."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from jaxserve.cells.graph import Chain, ChainForm, Node, Output, Tree, TreeForm, label_of
from jaxserve.cells.tree_shape import TreeShape, checked_pairs
from jaxserve.cells.values import Constant, ValueSpec, as_constant, as_constants
from jaxserve.core.errors import (
    InputMismatchError,
    InvalidCellError,
    InvalidGraphError,
    MissingInputError,
    UnknownInputError,
)

# The compiled batch sizes of a cell by default.
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# A cell remembers how it bound the inputs of this many chains, and of as many trees.
_MAX_FORMS = 256


class BaseCell:
    """A unit of computation with named inputs and outputs, of which graphs have many nodes.

    Calling a cell makes a node. Cells with equal keys are one type: their nodes are batched
    together. Its subclasses are `Cell`, `Repeat` and `SimulatedCell`.

    Args:
      key: identity of the type: the computation, its weights and its signature.
      name: the name in reports and errors.
      inputs, outputs: the values of one node, without the batch axis.
      priority: a type with a higher priority runs first. Give a cell that comes later in a graph a
        higher priority.
      batch_sizes: increasing sizes for which the cell is compiled. The last is the largest batch; a
        task of fewer nodes than the first is submitted only if there is no other.
      is_loop: whether a node repeats the cell until its own outputs say that it has ended.
      emits: a loop's outputs whose values of all steps a graph may return.
      carry: a loop's input -> the output of the previous step that it takes.
      ends_by_itself: whether a loop may end before its `max_steps`.
    """

    def __init__(
        self,
        key: Hashable,
        name: str,
        inputs: Mapping[str, ValueSpec],
        outputs: Mapping[str, ValueSpec],
        *,
        priority: int = 0,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        is_loop: bool = False,
        emits: Sequence[str] = (),
        carry: Mapping[str, str] | None = None,
        ends_by_itself: bool = False,
    ):
        sizes = _checked_sizes(name, batch_sizes)
        if not inputs or not outputs:
            raise InvalidCellError(
                f"cell {name!r} has {len(inputs)} inputs and {len(outputs)} outputs; it needs at "
                "least one of each"
            )
        self.key = key
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.priority = priority
        self.batch_sizes = sizes
        self.is_loop = is_loop
        self.emits = tuple(emits)
        self.carry = dict(carry or {})
        self.ends_by_itself = ends_by_itself
        self.output_index = {output: index for index, output in enumerate(self.outputs)}
        # Arguments of `chain` without its constants -> the inputs and the carry of its node.
        self._chains: dict[Hashable, ChainForm] = {}
        # By the leaves' cell and the outputs that pairs take.
        self._trees: dict[Hashable, TreeForm] = {}
        # For each input: name, spec, what 0.0 becomes, and whether an int needs no conversion.
        self._bound = [
            (name, spec, as_constant(0.0, spec), spec.shape == () and spec.dtype == np.int32)
            for name, spec in self.inputs.items()
        ]

    def resized(self, batch_sizes: Sequence[int]) -> Self:
        """Return a cell of the same type with other batch sizes; raises InvalidCellError.

        A runtime that is created with it accepts nodes of both cells.
        """
        found = copy.copy(self)
        found.batch_sizes = _checked_sizes(self.name, batch_sizes)
        return found

    def __call__(self, *only: Any, **inputs: Any) -> Node:
        """Return a node with these inputs: outputs of other nodes, and constants.

        An input that is given a node takes its only output, or the one with the input's name.

        Args:
          only: the input of a cell with one input, without its name.

        Raises:
          MissingInputError, UnknownInputError, InputMismatchError
        """
        return Node(self, self.bind(self._named(only, inputs) if only else inputs))

    def chain(
        self,
        each: Mapping[str, Sequence[Any] | np.ndarray],
        carry: Mapping[str, str],
        **inputs: Any,
    ) -> Node:
        """Return the last node of a chain, at a lower host cost than one call for each node.

        A runtime schedules the nodes one by one, like those of single calls. Only the last node's
        outputs can be taken.

        Args:
          each: input -> its constants, one for each node; at least one.
          carry: input -> the output of the previous node that it takes.
          inputs: the first node's inputs that are not in `each`. Those that are not carried are the
            same for all nodes.

        Raises:
          MissingInputError, UnknownInputError, InputMismatchError, InvalidGraphError
        """
        constants = tuple(
            [self._constants(name, each[name]) if name in each else None for name in self.inputs]
        )
        lengths = {len(values) for values in constants if values is not None}
        if len(lengths) != 1 or 0 in lengths or self.is_loop or not carry:
            raise InvalidGraphError(
                f"a chain of cell {self.name!r} was given {sorted(lengths)} values of the inputs "
                f"{list(each)} and carry={dict(carry)}; pass as many of each input, at least one, "
                "and an input to carry, for a cell that is not a Repeat"
            )
        # Chains whose other inputs are plain numbers share a form, so that they are bound once.
        key = form = None
        if all([type(value) in (int, float) for value in inputs.values()]):
            types = tuple(map(type, inputs.values()))
            key = tuple(each), tuple(carry.items()), tuple(inputs.items()), types
            form = self._chains.get(key)
        if form is None:
            is_shared = key is not None and len(self._chains) < _MAX_FORMS
            form = self._chain_form(constants, each, carry, inputs, is_shared=is_shared)
            if is_shared:
                self._chains[key] = form
        bound = tuple(
            [
                one if values is None else values[0]
                for one, values in zip(form.inputs, constants, strict=True)
            ]
        )
        return Node(self, bound, block=Chain(lengths.pop(), constants, form))

    def _chain_form(
        self,
        constants: Sequence[np.ndarray | None],
        each: Collection[str],
        carry: Mapping[str, str],
        inputs: Mapping[str, Any],
        *,
        is_shared: bool,
    ) -> ChainForm:
        for name, output in carry.items():
            spec = self.inputs.get(name)
            if spec is None or name in each or self.outputs.get(output) != spec:
                raise InputMismatchError(
                    f"a chain of cell {self.name!r} was given carry={{{name!r}: {output!r}}}; pass "
                    "an input that is not in each, and an output with its shape and dtype"
                )
        first = {
            name: values[0]
            for name, values in zip(self.inputs, constants, strict=True)
            if values is not None
        }
        unknown = {name: None for name in each if name not in first}
        bound = self.bind({**unknown, **first, **inputs})
        return ChainForm(
            [one if values is None else None for one, values in zip(bound, constants, strict=True)],
            tuple(self.output_index.get(carry.get(name, ""), -1) for name in self.inputs),
            is_shared,
        )

    def tree(
        self,
        leaf: BaseCell,
        each: Mapping[str, Sequence[Any] | np.ndarray],
        pairs: Sequence[Sequence[int]] | np.ndarray | TreeShape,
        *,
        left: Mapping[str, str],
        right: Mapping[str, str],
    ) -> Node:
        """Return the root of a binary tree, at a lower host cost than one call for each node.

        A runtime schedules the nodes one by one, like those of single calls. Only the root's
        outputs can be taken. Leaves are numbered from 0, then pairs in their order.

        Args:
          leaf: the cell of the leaves, which takes constants only. Nodes of this cell join two
            nodes.
          each: input of `leaf` -> its constants, one for each leaf; at least one.
          pairs: [leaves - 1, 2], the numbers of the left and the right node that each pair joins,
            or the shape that `numbered` returned. A pair joins earlier nodes, and every node except
            the last one, the root, is in one pair.
          left, right: input -> the output of the left or the right node that it takes. Each input
            is in one of them.

        Raises:
          MissingInputError, UnknownInputError, InputMismatchError, InvalidGraphError
        """
        given = {
            name: leaf._constants(name, values)
            for name, values in each.items()
            if name in leaf.inputs
        }
        lengths = {len(values) for values in given.values()}
        if len(lengths) != 1 or 0 in lengths or self.is_loop or leaf.is_loop:
            raise InvalidGraphError(
                f"a tree of cell {self.name!r} was given {sorted(lengths)} values of the inputs "
                f"{list(each)} of its leaves; pass as many of each input, at least one, and cells "
                "that are not a Repeat"
            )
        num_leaves = lengths.pop()
        if not (len(each) == len(given) == len(leaf.inputs)):
            leaf.bind({name: given[name][0] if name in given else None for name in each})
        constants = tuple([given[name] for name in leaf.inputs])
        joined = pairs.pairs if isinstance(pairs, TreeShape) else pairs
        if num_leaves == 1 and not len(joined):
            return Node(leaf, leaf.bind({name: values[0] for name, values in given.items()}))
        form = self._tree_form(leaf, left, right)
        if isinstance(pairs, TreeShape) and len(joined) == num_leaves - 1:
            shape = pairs
        else:
            shape = TreeShape(checked_pairs(self.name, joined, num_leaves))
        return Node(self, (), block=Tree(form, constants, shape))

    def _tree_form(
        self, leaf: BaseCell, left: Mapping[str, str], right: Mapping[str, str]
    ) -> TreeForm:
        key = leaf.key, tuple(left.items()), tuple(right.items())
        form = self._trees.get(key)
        if form is not None:
            return form
        for name, output in (*left.items(), *right.items()):
            spec = self.inputs.get(name)
            if spec is None or not spec == leaf.outputs.get(output) == self.outputs.get(output):
                raise InputMismatchError(
                    f"a tree of cell {self.name!r} was given {{{name!r}: {output!r}}}; pass an "
                    f"input, and an output that it and {leaf.name!r} have with its shape and dtype"
                )
        sides = [(0, left[name]) if name in left else (1, right.get(name)) for name in self.inputs]
        if len(left) + len(right) != len(sides) or any(output is None for _, output in sides):
            raise MissingInputError(
                f"a tree of cell {self.name!r} was given left={dict(left)} and "
                f"right={dict(right)}; pass each of {list(self.inputs)} in one of them"
            )
        form = TreeForm(
            leaf, tuple(side for side, _ in sides), tuple(str(output) for _, output in sides)
        )
        if len(self._trees) < _MAX_FORMS:
            self._trees[key] = form
        return form

    def _constants(self, name: str, values: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Return an input's constants of many nodes, checked, as an array of its dtype."""
        spec = self.inputs[name]
        if (array := as_constants(values, spec)) is None:
            raise InputMismatchError(
                f"a chain or tree of {self.name!r} was given {ValueSpec.of(np.asarray(values))} as "
                f"{name!r}; pass an array of {spec}, one for each node"
            )
        return array

    def bind(self, inputs: Mapping[str, Any]) -> tuple[Output | Constant, ...]:
        bound: list[Output | Constant] = []
        if len(inputs) != len(self._bound):
            self._refuse_names(inputs)
        for name, spec, zero, is_int32 in self._bound:
            if name not in inputs:
                self._refuse_names(inputs)
            value = inputs[name]
            if type(value) is Node:
                outputs = value.cell.outputs
                if name not in outputs and len(outputs) > 1:
                    self._refuse_value(name, inputs)
                value = value[name if name in outputs else next(iter(outputs))]
            if type(value) is Output:
                if value.spec is not spec:  # specs of one shape and dtype are one object
                    self._refuse_value(name, inputs)
            elif not (is_int32 and type(value) is int and -(2**31) <= value < 2**31):
                is_zero = type(value) is float and value == 0.0
                value = zero if is_zero else as_constant(value, spec)
                if value is None:
                    self._refuse_value(name, inputs)
            bound.append(value)
        return tuple(bound)

    def _named(self, only: tuple[Any, ...], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the input that was given without its name; raises UnknownInputError."""
        names = list(self.inputs)
        if len(names) > 1 or len(only) + len(inputs) > 1:
            label = label_of(self, (*only, *inputs.values()))
            raise UnknownInputError(
                f"{label} was given {len(only)} inputs without a name; its inputs are "
                f"{', '.join(map(repr, names))}, so pass them as {names[0]}=..."
            )
        return {names[0]: only[0]}

    def _refuse_names(self, inputs: Mapping[str, Any]) -> NoReturn:
        allowed = f"its inputs are {', '.join(map(repr, self.inputs))}"
        label = label_of(self, inputs.values())
        unknown = [name for name in inputs if name not in self.inputs]
        if unknown:
            raise UnknownInputError(f"{label} was given {unknown[0]!r}; {allowed}")
        missing = next(name for name in self.inputs if name not in inputs)
        raise MissingInputError(f"{label} was not given {missing!r}; {allowed}, so pass it, too")

    def _refuse_value(self, name: str, inputs: Mapping[str, Any]) -> NoReturn:
        value, spec = inputs[name], self.inputs[name]
        label = label_of(self, inputs.values())
        if isinstance(value, Output):
            given = f"{value}, which is {value.spec}"
        elif isinstance(value, np.ndarray | np.generic):
            given = f"an array {ValueSpec.of(value)}"
        elif isinstance(value, Node):
            outputs = ", ".join(map(repr, value.cell.outputs))
            given = f"{value}, which has the outputs {outputs}, none of them named {name!r}"
        else:
            given = f"{value!r} of type {type(value).__name__}"
        raise InputMismatchError(
            f"{label}: input {name!r} was given {given}; it must be {spec}, from another node or "
            "as a NumPy array, or a number that this dtype holds"
        )


def _checked_sizes(name: str, batch_sizes: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(batch_sizes)
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise InvalidCellError(
            f"cell {name!r}: batch_sizes={sizes} is not allowed; pass increasing sizes from 1"
        )
    return sizes
