"""Cells of Flax modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

import jax
from flax import nnx
from flax.errors import TraceContextError

from jaxserve.cells.base import BATCH_SIZES, BaseCell
from jaxserve.cells.graph import Node
from jaxserve.cells.values import HasShape, ValueSpec
from jaxserve.core.errors import InvalidCellError, InvalidGraphError


@final
class Cell(BaseCell):
    """A Flax module as a unit of computation.

    Two cells of one module object and one signature are one type.

    Args:
      module: a module whose `__call__(**inputs)` takes arrays with a leading batch axis and returns
        a dict of arrays with a leading batch axis. A row must not depend on other rows. It reads
        its parameters and no other state.
      inputs: the shape and dtype of each input without the batch axis, for instance a
        `jax.ShapeDtypeStruct`.
      outputs: the same for the outputs; found with `jax.eval_shape` by default, and otherwise
        checked.
      name: the name in reports and errors; by default the module's class.
      priority, batch_sizes: see `BaseCell`.
      takes_rows: whether the module also takes inputs as `jaxserve.kernels.RowsAt`, rows of a pool
        of states that are not gathered. GPUs and CPUs then pass these for inputs that do not travel
        with the task.
      allows_infinite: whether outputs may be infinite, such as masked logits. By default infinity
        ends the request as NaN does.

    Raises:
      InvalidCellError: the module does not take these inputs, does not return these outputs, or
        changes its own state.
    """

    def __init__(
        self,
        module: nnx.Module,
        inputs: Mapping[str, HasShape],
        outputs: Mapping[str, HasShape] | None = None,
        *,
        name: str | None = None,
        priority: int = 0,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        takes_rows: bool = False,
        allows_infinite: bool = False,
    ):
        name = type(module).__name__ if name is None else name
        specs = _specs_of(name, "input", inputs)
        found = _outputs_of(module, specs, name)
        given = found if outputs is None else _specs_of(name, "output", outputs)
        if given != found:
            raise InvalidCellError(
                f"cell {name!r}: outputs={_listed(given)} was given, and the module returns "
                f"{_listed(found)}; pass these, or leave outputs out"
            )
        key = (id(module), tuple(specs.items()), allows_infinite)
        super().__init__(key, name, specs, found, priority=priority, batch_sizes=batch_sizes)
        self.module = module
        self.takes_rows = takes_rows
        self.allows_infinite = allows_infinite


@final
class Repeat(BaseCell):
    """A loop of a cell on the device: outputs of a step are inputs of the next one.

    Create it once, together with its cell, and call it while unfolding, with the inputs of the
    first step and the most steps:

        decode = Repeat(decoder, carry={"h": "h", "token": "token"}, until=is_end, emits=["token"])
        answer = decode(h=encoded["h"], token=GO, max_steps=50)
        return Graph(outputs={"tokens": answer.steps("token")})

    The device decides the number of steps, and the host learns it later: between two steps the
    device does not wait for the host. Requests join and leave the loop at any step.

    Args:
      cell: the cell to repeat.
      carry: input -> the output of the previous step that it takes. Other inputs stay the same.
      until: function of the outputs' arrays, with a batch axis, that returns for each row whether
        the loop ends with this step. It must be traceable by JAX. None runs `max_steps` steps.
      emits: the outputs whose values of all steps a graph may return, as `node.steps(name)`.
      name, priority, batch_sizes: by default those of the cell.

    Raises:
      InvalidCellError: `carry` or `emits` do not fit the cell, or `until` does not return a bool
        per row.
    """

    def __init__(
        self,
        cell: Cell,
        carry: Mapping[str, str],
        until: Callable[[Mapping[str, jax.Array]], jax.Array] | None = None,
        *,
        emits: Sequence[str] = (),
        name: str | None = None,
        priority: int | None = None,
        batch_sizes: Sequence[int] | None = None,
    ):
        name = f"repeated {cell.name}" if name is None else name
        for given, taken in carry.items():
            if cell.inputs.get(given) != cell.outputs.get(taken) or given not in cell.inputs:
                raise InvalidCellError(
                    f"cell {name!r}: carry={{{given!r}: {taken!r}}} takes "
                    f"{cell.outputs.get(taken)} as {cell.inputs.get(given)}; pass an input and an "
                    "output of the cell with the same shape and dtype"
                )
        if not carry:
            raise InvalidCellError(
                f"cell {name!r}: carry is empty; name the outputs that the next step takes"
            )
        for output in emits:
            if output not in cell.outputs:
                raise InvalidCellError(
                    f"cell {name!r} has no output {output!r} to emit; its outputs are "
                    f"{', '.join(map(repr, cell.outputs))}"
                )
        if until is not None:
            _check_until(name, until, cell)
        key: Hashable = ("repeat", cell.key, tuple(carry.items()), until, tuple(emits))
        super().__init__(
            key,
            name,
            cell.inputs,
            cell.outputs,
            priority=cell.priority if priority is None else priority,
            batch_sizes=cell.batch_sizes if batch_sizes is None else batch_sizes,
            is_loop=True,
            emits=emits,
            carry=carry,
            ends_by_itself=until is not None,
        )
        self.module = cell.module
        self.takes_rows = cell.takes_rows
        self.allows_infinite = cell.allows_infinite
        self.until = until

    def __call__(self, *only: Any, max_steps: int, **inputs: Any) -> Node:
        """Return a node that repeats the cell at least once and at most `max_steps` times.

        The inputs and errors are those of `BaseCell.__call__`.
        """
        if max_steps < 1:
            raise InvalidGraphError(
                f"a node of cell {self.name!r} was given max_steps={max_steps}; pass at least 1"
            )
        return Node(self, self.bind(self._named(only, inputs) if only else inputs), max_steps)


def _specs_of(cell: str, what: str, values: Mapping[str, HasShape]) -> dict[str, ValueSpec]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = ValueSpec.of(value)
        except AttributeError as error:
            raise InvalidCellError(
                f"cell {cell!r}: {what} {name!r} is a {type(value).__name__}; pass one array or "
                "jax.ShapeDtypeStruct for each name, so give the parts of a structure names of "
                "their own, such as h and c"
            ) from error
    return found


def _batched(specs: Mapping[str, ValueSpec], size: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((size, *spec.shape), spec.dtype) for name, spec in specs.items()
    }


# A batch size that is unlikely to be a size of a value.
_PROBE_SIZE = 3


def _outputs_of(module: nnx.Module, inputs: Mapping[str, ValueSpec], name: str):
    def call(arrays: dict[str, jax.Array]) -> Any:
        return _merged(module)(**arrays)

    try:
        found = jax.eval_shape(call, _batched(inputs, _PROBE_SIZE))
    except TraceContextError as error:
        raise InvalidCellError(
            f"cell {name!r}: the module changes its own state ({error}); a cell only reads its "
            "parameters, so call module.eval() for its Dropout and BatchNorm layers, and pass "
            "states as inputs"
        ) from error
    except Exception as error:
        raise InvalidCellError(
            f"cell {name!r}: the module fails with inputs "
            f"{_listed(inputs)}, each with a batch axis "
            f"({type(error).__name__}: {error}); pass the inputs that its __call__ takes"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InvalidCellError(
            f"cell {name!r}: the module returned a {type(found).__name__}; return a dict of arrays"
        )
    specs = _specs_of(name, "output", found)
    for key, value in found.items():
        if not value.shape or value.shape[0] != _PROBE_SIZE:
            raise InvalidCellError(
                f"cell {name!r}: output {key!r} has the shape {value.shape} for a batch of "
                f"{_PROBE_SIZE}; return arrays with a leading batch axis"
            )
        specs[key] = ValueSpec.of(jax.ShapeDtypeStruct(value.shape[1:], value.dtype))
    return specs


def _merged(module: nnx.Module) -> Any:
    """Return a copy of a module that may be called under a separate trace."""
    return nnx.merge(*nnx.split(module))


def _listed(specs: Mapping[str, ValueSpec]) -> str:
    return "{" + ", ".join(f"{key}: {spec}" for key, spec in specs.items()) + "}"


def _check_until(name: str, until: Callable[..., Any], cell: Cell) -> None:
    found = jax.eval_shape(until, _batched(cell.outputs, _PROBE_SIZE))
    if found.shape != (_PROBE_SIZE,) or found.dtype != bool:
        raise InvalidCellError(
            f"cell {name!r}: until returns {found.dtype}{list(found.shape)} for {_PROBE_SIZE} "
            "rows; return one bool per row"
        )
