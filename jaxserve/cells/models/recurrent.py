"""LSTM and GRU steps, alone and with an embedding before them or a projection after them.

Every module is the computation of a cell: it takes arrays with a batch axis by name, and returns a
dict of such arrays. Gates are in PyTorch's order, so that its weights load as they are.
"""

from __future__ import annotations

from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.cells.values import ValueSpec
from pallas_kernels import matmul


class Step(Protocol):
    """One step of a recurrent network.

    It is called with `x` [batch, input_size] and each of its states [batch, hidden_size] by name.
    """

    input_size: int
    hidden_size: int

    @property
    def state(self) -> tuple[str, ...]:
        """The names of its states, which are inputs and outputs; the first is `h`."""
        ...

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

    def __call__(
        self,
        x: Float[Array, "batch input"],
        h: Float[Array, "batch hidden"],
        c: Float[Array, "batch hidden"],
    ) -> dict[str, jax.Array]:
        gates = matmul(jnp.concatenate([x, h], axis=-1), self.kernel[...]) + self.bias[...]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}


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

    def __call__(
        self, x: Float[Array, "batch input"], h: Float[Array, "batch hidden"]
    ) -> dict[str, jax.Array]:
        of_x = matmul(x, self.kernel_x[...]) + self.bias_x[...]
        of_h = matmul(h, self.kernel_h[...]) + self.bias_h[...]
        r_x, z_x, n_x = jnp.split(of_x, 3, axis=-1)
        r_h, z_h, n_h = jnp.split(of_h, 3, axis=-1)
        r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
        n = jnp.tanh(n_x + r * n_h)
        return {"h": (1 - z) * n + z * h}


@final
class Embedded(nnx.Module):
    """An embedding and a step after it: `token` in place of `x`.

    Attributes:
      table: [vocab_size, input_size].
    """

    def __init__(self, step: Step, vocab_size: int, *, rngs: nnx.Rngs):
        self.step = step
        self.vocab_size = vocab_size
        shape = (vocab_size, step.input_size)
        self.table = nnx.Param(jax.random.normal(rngs.params(), shape))

    def __call__(
        self, token: Int32[Array, " batch"], **state: Float[Array, "batch hidden"]
    ) -> dict[str, jax.Array]:
        return self.step(self.table[...][token], **state)


@final
class Predicting(nnx.Module):
    """A step after an embedding, a projection after it, and the likeliest token as an output.

    Its `token` is the input of the next step: the feed-previous decoder of section 2.7.4.

    Attributes:
      kernel: [hidden_size, vocab_size]; bias: [vocab_size].
    """

    def __init__(self, embedded: Embedded, *, rngs: nnx.Rngs):
        self.embedded = embedded
        hidden_size, vocab_size = embedded.step.hidden_size, embedded.vocab_size
        self.kernel = uniform(rngs, (hidden_size, vocab_size), hidden_size)
        self.bias = uniform(rngs, (vocab_size,), hidden_size)

    def __call__(
        self, token: Int32[Array, " batch"], **state: Float[Array, "batch hidden"]
    ) -> dict[str, jax.Array]:
        found = self.embedded(token, **state)
        logits = matmul(found["h"], self.kernel[...]) + self.bias[...]
        return {**found, "token": jnp.argmax(logits, axis=-1).astype(jnp.int32)}


def token_inputs(step: Step) -> dict[str, ValueSpec]:
    """Return the inputs of a cell of `Embedded` or `Predicting`: the token and the states."""
    return {"token": ValueSpec((), jnp.dtype(jnp.int32)), **state_inputs(step)}


def state_inputs(step: Step) -> dict[str, ValueSpec]:
    """Return the states of a step as inputs of a cell."""
    spec = ValueSpec((step.hidden_size,), jnp.dtype(jnp.float32))
    return dict.fromkeys(step.state, spec)


def uniform(rngs: nnx.Rngs, shape: tuple[int, ...], hidden_size: int) -> nnx.Param:
    """Return a parameter of PyTorch's distribution: uniform within 1 / sqrt(hidden_size)."""
    limit = hidden_size**-0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))
