"""Seq2Seq whose answers have given lengths, which only the device knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from jaxserve.cells import Cell, Graph, Repeat
from jaxserve.cells.models import CellModel, Predicting
from jaxserve.cells.models.recurrent import Batch, Reader, token_inputs
from jaxserve.cells.models.sequence import read, token_cell
from jaxserve.cells.values import ValueSpec


@final
class Counted(nnx.Module):
    """A decoder step that also counts down the tokens that are left.

    As in the thesis (2.7.4), an answer has a given number of tokens, whatever they are, and neither
    the host nor a policy knows it before it ends.
    """

    def __init__(self, decoder: Predicting):
        self.decoder = decoder

    def __call__(
        self,
        token: Int32[Array, " batch"],
        left: Int32[Array, " batch"],
        **state: Batch,
    ) -> dict[str, jax.Array]:
        return {**self.decoder(token, **state), "left": left - 1}


def counted_seq2seq(
    encoder: Reader, decoder: Predicting, batch_sizes: Mapping[str, Sequence[int]]
) -> CellModel:
    """Return a model whose inputs are `CellRequest`s, and whose results have the tokens."""
    reader = decoder.embedded
    encode = token_cell(encoder, name="encoder", batch_sizes=batch_sizes["encoder"])
    inputs = {**token_inputs(reader), "left": ValueSpec((), jnp.dtype(jnp.int32))}
    once = Cell(Counted(decoder), inputs, name="decoder", priority=1, takes_rows=True)
    decode = Repeat(
        once,
        {name: name for name in inputs},
        _is_last,
        emits=["token"],
        name="decoder",
        batch_sizes=batch_sizes["decoder"],
    )

    def unfold(request: Any) -> Graph:
        node = read(encode, encoder, request.tokens)
        states = {name: node[name] for name in reader.state}
        answer = decode(
            token=0, left=request.num_output_tokens, max_steps=request.max_steps, **states
        )
        return Graph(outputs={"token": answer.steps("token")})

    return CellModel((encode, decode), unfold)


def _is_last(outputs: Mapping[str, jax.Array]) -> jax.Array:
    return outputs["left"] == 0
