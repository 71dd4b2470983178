"""Models of sequences: one cell a token, and an encoder with a decoder that reads its own
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.cell import Cell, Repeat
from jaxserve.cells.graph import Graph, Node
from jaxserve.cells.models.bundle import CellModel, checked_tokens
from jaxserve.cells.models.recurrent import Embedded, Predicting, Reader, token_inputs
from jaxserve.core.errors import InvalidConfigError


def sequence_model(
    module: Reader,
    *,
    name: str | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    returns: Sequence[str] | None = None,
) -> CellModel:
    """Return a model whose inputs are lists of tokens, and whose results have the last states.

    States begin at zero. `module` is `Embedded` around an `LSTM`, a `GRU`, or several of them
    (`Stacked`), or a `FoldedLSTM`.

    Args:
      returns: the states that results have; all by default.
    """
    cell = token_cell(module, name=name, batch_sizes=batch_sizes)

    def unfold(tokens: Sequence[int]) -> Graph:
        node = read(cell, module, tokens)
        return Graph(outputs={state: node[state] for state in returns or module.state})

    return CellModel((cell,), unfold)


def token_cell(module: Reader, *, name: str | None, batch_sizes: Sequence[int]) -> Cell:
    if name is None:
        step = module.step if isinstance(module, Embedded) else module
        name = type(step).__name__.lower()
    given: Any = module
    return Cell(given, token_inputs(module), name=name, batch_sizes=batch_sizes, takes_rows=True)


def read(cell: Cell, module: Reader, tokens: Sequence[int]) -> Node:
    """Return the last node of a chain that reads the tokens; raises as `checked_tokens` does."""
    states = module.state
    zeros: dict[str, Any] = dict.fromkeys(states, 0.0)
    given = {"token": checked_tokens(tokens, module.vocab_size)}
    return cell.chain(given, dict(zip(states, states, strict=True)), **zeros)


@final
@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a decoder begins and ends.

    Attributes:
      go: the first token that the decoder reads.
      end: the token that ends an answer, and is its last one; None for no such token.
      max_steps: most tokens of an answer, by the number of tokens that the encoder reads. Deployed
        systems allow a fixed number more than the input has (thesis, 2.7.4).
    """

    go: int
    end: int | None
    max_steps: Callable[[int], int]


def seq2seq_model(
    encoder: Reader,
    decoder: Predicting,
    decoding: Decoding,
    *,
    encoder_batch_sizes: Sequence[int] = BATCH_SIZES,
    decoder_batch_sizes: Sequence[int] = BATCH_SIZES,
) -> CellModel:
    """Return a model whose inputs are lists of tokens, and whose results have the answer's `token`.

    The decoder begins with the encoder's last states. The device decides its argmax and its end, so
    that no token waits for the host. Decoder cells have priority over encoder cells (thesis,
    2.4.3).

    Raises:
      InvalidConfigError: encoder and decoder differ in states or their sizes.
    """
    encode = encoder_cell(encoder, decoder, encoder_batch_sizes)
    other = decoder.embedded
    once = Cell(decoder, token_inputs(other), name="decoder", priority=1, takes_rows=True)
    carried = {name: name for name in ("token", *other.state)}
    decode = Repeat(
        once,
        carried,
        None if decoding.end is None else EndsWith(decoding.end),
        emits=["token"],
        name="decoder",
        batch_sizes=decoder_batch_sizes,
    )

    def unfold(tokens: Sequence[int]) -> Graph:
        node = read(encode, encoder, tokens)
        states = {name: node[name] for name in encoder.state}
        answer = decode(token=decoding.go, max_steps=decoding.max_steps(len(tokens)), **states)
        return Graph(outputs={"token": answer.steps("token")})

    return CellModel((encode, decode), unfold)


def encoder_cell(encoder: Reader, decoder: Predicting, batch_sizes: Sequence[int]) -> Cell:
    """Return the cell of an encoder whose last states a decoder takes.

    Raises:
      InvalidConfigError: encoder and decoder differ in states or their sizes.
    """
    other = decoder.embedded
    if (encoder.state, encoder.hidden_size) != (other.state, other.hidden_size):
        raise InvalidConfigError(
            f"the encoder has the states {encoder.state} of {encoder.hidden_size} values, and the "
            f"decoder {other.state} of {other.hidden_size}; pass modules with equal states"
        )
    return token_cell(encoder, name="encoder", batch_sizes=batch_sizes)


@final
@dataclass(frozen=True)
class EndsWith:
    """Whether all last tokens of each row are the end token; equal for equal tokens."""

    token: int

    def __call__(self, outputs: Mapping[str, jax.Array]) -> jax.Array:
        is_end = outputs["token"] == jnp.int32(self.token)
        return is_end.reshape(len(is_end), -1).all(axis=1)
