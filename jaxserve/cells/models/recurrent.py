"""LSTM and GRU steps, alone and with an embedding before them or a projection after them.

Every module is the computation of a cell: it takes arrays with a batch axis by name, and returns a
dict of such arrays. Gates are in PyTorch's order, so that its weights load unchanged.

States may also be given as rows of a pool, which a GPU's kernel reads in place; see `RowsAt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from jaxserve.cells.values import ValueSpec
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import Product, RowsAt, gated_cell, matmul
from jaxserve.kernels.gated_cell import GatedCell, rows_at
from jaxserve.steps.sampling.choice import argmax

# Rows of a batch: an array [batch, size], or rows of a larger array that a kernel gathers.
Batch: TypeAlias = "jax.Array | RowsAt"


class Recurrent(Protocol):
    """A module with states [batch, hidden_size], which are inputs and outputs."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def state(self) -> tuple[str, ...]:
        """The names of its states; the first is `h`."""
        ...


class RecurrentStep(Recurrent, Protocol):
    """One step of a recurrent network, called with `x` [batch, input_size] and states by name."""

    input_size: int

    def __call__(self, *args: Any, **named: Any) -> dict[str, jax.Array]: ...


class Reader(Recurrent, Protocol):
    """A step that takes `token` [batch] and its states: `Embedded`, or a `FoldedLSTM`."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, *args: Any, **named: Any) -> dict[str, jax.Array]: ...


@final
class LSTM(nnx.Module):
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997), as `torch.nn.LSTMCell` computes it.

    Attributes:
      kernel: [input_size + hidden_size, 4 * hidden_size], gates in the order i, f, g, o. One
        product of [x, h] with it gives all gates, as in section 2.2.2 of the BatchMaker thesis.
      bias: [4 * hidden_size], the sum of PyTorch's two.
    """

    state = ("h", "c")

    def __init__(self, input_size: int, hidden_size: int, *, rngs: nnx.Rngs):
        self.input_size, self.hidden_size = input_size, hidden_size
        self.kernel = uniform(rngs, (input_size + hidden_size, 4 * hidden_size), hidden_size)
        self.bias = uniform(rngs, (4 * hidden_size,), hidden_size)

    def __call__(self, x: Batch, h: Batch, c: Batch) -> dict[str, jax.Array]:
        return states_of(self.as_gated_cell(x, h, c))

    def as_gated_cell(self, x: Batch, h: Batch, c: Batch) -> GatedCell:
        product = Product(rows_at(x, h), self.kernel[...], self.bias[...])
        return GatedCell("lstm", (product,), rows_at(c))


@final
class GRU(nnx.Module):
    """One step of a GRU, as `torch.nn.GRUCell` computes it: the reset gate acts after the product.

    Attributes:
      kernel_x: [input_size, 3 * hidden_size], gates in the order r, z, n; kernel_h likewise.
      bias_x, bias_h: [3 * hidden_size].
    """

    state = ("h",)

    def __init__(self, input_size: int, hidden_size: int, *, rngs: nnx.Rngs):
        self.input_size, self.hidden_size = input_size, hidden_size
        self.kernel_x = uniform(rngs, (input_size, 3 * hidden_size), hidden_size)
        self.kernel_h = uniform(rngs, (hidden_size, 3 * hidden_size), hidden_size)
        self.bias_x = uniform(rngs, (3 * hidden_size,), hidden_size)
        self.bias_h = uniform(rngs, (3 * hidden_size,), hidden_size)

    def __call__(self, x: Batch, h: Batch) -> dict[str, jax.Array]:
        of_x = Product(rows_at(x), self.kernel_x[...], self.bias_x[...])
        of_h = Product(rows_at(h), self.kernel_h[...], self.bias_h[...])
        (new_h,) = gated_cell("gru", [of_x, of_h], rows_at(h))
        return {"h": new_h}


@final
class Stacked(nnx.Module):
    """One step of several layers, each of which reads the states `h` of the layer below it.

    All layers run in one cell. The states of the last layer have its own names, such as `h` and
    `c`; those of the layers below have the layer's number, such as `h_0` and `c_0`.

    Args:
      layers: from the first to the last, at least two, of one class and one hidden size.

    Raises:
      InvalidConfigError: the layers do not fit together.
    """

    def __init__(self, layers: Sequence[RecurrentStep]):
        sizes = [(layer.input_size, layer.hidden_size) for layer in layers]
        fits = all(size == (sizes[0][1], sizes[0][1]) for size in sizes[1:])
        if len(layers) < 2 or not fits or len({type(layer) for layer in layers}) > 1:
            kinds = ", ".join(type(layer).__name__ for layer in layers)
            raise InvalidConfigError(
                f"layers {kinds} with (input, hidden) sizes {sizes} do not form a stack; pass at "
                "least two of one class, of which each reads the hidden size of the one below"
            )
        self.layers = nnx.List(layers)
        self.input_size, self.hidden_size = sizes[0]

    @property
    def state(self) -> tuple[str, ...]:
        """The names of the last layer's states, then of each layer's from the first on."""
        *below, last = (self._names(number) for number in range(len(self.layers)))
        return (*last.values(), *(name for names in below for name in names.values()))

    def __call__(self, x: Batch, **state: Batch) -> dict[str, jax.Array]:
        found: dict[str, jax.Array] = {}
        for number, layer in enumerate(self.layers):
            names = self._names(number)
            new = layer(x, **{own: state[name] for own, name in names.items()})
            found |= {name: new[own] for own, name in names.items()}
            x = new["h"]
        return found

    def _names(self, number: int) -> dict[str, str]:
        is_last = number == len(self.layers) - 1
        own = self.layers[number].state
        return {name: name if is_last else f"{name}_{number}" for name in own}


@final
class Embedded(nnx.Module):
    """An embedding `table` [vocab_size, input_size] and a step, called with `token` for `x`."""

    def __init__(self, step: RecurrentStep, vocab_size: int, *, rngs: nnx.Rngs):
        self.step = step
        self.vocab_size = vocab_size
        shape = (vocab_size, step.input_size)
        self.table = nnx.Param(jax.random.normal(rngs.params(), shape))

    @property
    def hidden_size(self) -> int:
        return self.step.hidden_size

    @property
    def state(self) -> tuple[str, ...]:
        return self.step.state

    def __call__(self, token: Int32[Array, " batch"], **state: Batch) -> dict[str, jax.Array]:
        return self.step(RowsAt(self.table[...], token), **state)

    def as_gated_cell(self, token: Int32[Array, " batch"], **state: Batch) -> GatedCell:
        """Return the step as a gated cell if it is an LSTM; otherwise raise NotImplementedError."""
        if not isinstance(self.step, LSTM):
            raise NotImplementedError(f"a {type(self.step).__name__} is not an LSTM")
        return self.step.as_gated_cell(RowsAt(self.table[...], token), **state)


@final
class Predicting(nnx.Module):
    """A step after an embedding, a projection after it, and the likeliest token as an output.

    Its `token` is the input of the next step: the feed-previous decoder of section 2.7.4.

    Attributes:
      kernel: [hidden_size, vocab_size]; bias: [vocab_size].
    """

    def __init__(self, embedded: Reader, *, rngs: nnx.Rngs):
        self.embedded = embedded
        hidden_size, vocab_size = embedded.hidden_size, embedded.vocab_size
        self.kernel = uniform(rngs, (hidden_size, vocab_size), hidden_size)
        self.bias = uniform(rngs, (vocab_size,), hidden_size)

    def __call__(self, token: Int32[Array, " batch"], **state: Batch) -> dict[str, jax.Array]:
        found, logits = self.logits(token, **state)
        return {**found, "token": argmax(logits)[0]}

    def logits(
        self, token: Int32[Array, " batch"], **state: Batch
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the new states, and the logits [batch, vocab_size] of the next token."""
        found = self.embedded(token, **state)
        return found, matmul(found["h"], self.kernel[...]) + self.bias[...]


def states_of(cell: GatedCell) -> dict[str, jax.Array]:
    assert cell.kind != "lookup"
    h, c = gated_cell(cell.kind, cell.products, cell.carried)
    return {"h": h, "c": c}


def token_inputs(module: Recurrent) -> dict[str, ValueSpec]:
    return {"token": ValueSpec((), jnp.dtype(jnp.int32)), **state_inputs(module)}


def state_inputs(module: Recurrent) -> dict[str, ValueSpec]:
    spec = ValueSpec((module.hidden_size,), jnp.dtype(jnp.float32))
    return dict.fromkeys(module.state, spec)


def uniform(rngs: nnx.Rngs, shape: tuple[int, ...], hidden_size: int) -> nnx.Param:
    """Return a parameter of PyTorch's distribution: uniform within 1 / sqrt(hidden_size)."""
    limit = hidden_size**-0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))
