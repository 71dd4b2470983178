"""Beam search on the device: a decoder cell whose row holds all beams of a request.

A step extends every hypothesis by every token and keeps the best ones, as TensorFlow's
`BeamSearchDecoder` does: a hypothesis that has ended stays among the beams, and scores are divided
by a penalty of length (Wu et al., 2016, https://arxiv.org/abs/1609.08144, equation 14). Steps emit
tokens and back-pointers, from which the host reads the hypotheses once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.cell import Cell, Repeat
from jaxserve.cells.graph import Graph
from jaxserve.cells.models.bundle import CellModel
from jaxserve.cells.models.recurrent import Batch, Predicting, Reader, state_inputs
from jaxserve.cells.models.seq2seq import Decoding, EndsWith, encoder_cell, read
from jaxserve.cells.values import ValueSpec
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import RowsAt
from jaxserve.steps.sampling.choice import top_k

# The log-probability of what must not be chosen. It is finite: a cell may not return infinite
# values.
_NEVER = -1e30
# What a step takes from the previous one, in addition to states.
_CARRIED = ("token", "parent", "total", "length")


def beam_search_model(
    encoder: Reader,
    decoder: Predicting,
    decoding: Decoding,
    *,
    num_beams: int,
    length_penalty: float = 0.0,
    encoder_batch_sizes: Sequence[int] = BATCH_SIZES,
    decoder_batch_sizes: Sequence[int] = BATCH_SIZES,
) -> CellModel:
    """Return a `seq2seq_model` that searches with beams instead of taking the likeliest tokens.

    Its results have the best hypothesis as `token` [length] and its `score`; and all of them, best
    first, as `tokens` [num_beams, steps], which end with the end token repeated, and `scores`
    [num_beams]. It searches until every beam has ended, or for the most steps.

    Args:
      num_beams: hypotheses that are kept at each step.
      length_penalty: the exponent `a` in the score: the sum of the logarithms of a hypothesis's
        probabilities, divided by ((5 + length) / 6)**a. The length counts the end token. Zero does
        not normalise.

    Raises:
      InvalidConfigError: encoder and decoder differ in states or their sizes; or `num_beams` is not
        from 1 to the number of tokens.
    """
    vocab_size = decoder.embedded.vocab_size
    if not 1 <= num_beams <= vocab_size:
        raise InvalidConfigError(
            f"num_beams={num_beams} is not allowed; pass 1 to {vocab_size}, the number of tokens"
        )
    encode = encoder_cell(encoder, decoder, encoder_batch_sizes)
    states = encoder.state
    spread = Cell(
        _Spread(num_beams),
        state_inputs(encoder),
        name="beams",
        priority=1,
        batch_sizes=decoder_batch_sizes,
    )
    searching = Searching(decoder, num_beams, decoding.end, length_penalty)
    once = Cell(searching, searching.inputs(), name="decoder", priority=2, takes_rows=True)
    decode = Repeat(
        once,
        {name: name for name in (*_CARRIED, *states)},
        None if decoding.end is None else EndsWith(decoding.end),
        emits=["token", "parent"],
        name="decoder",
        batch_sizes=decoder_batch_sizes,
    )
    # All beams are equal at first, so that only one of them may be extended.
    total = np.full(num_beams, _NEVER, np.float32)
    total[0] = 0.0

    def unfold(tokens: Sequence[int]) -> Graph:
        read_all = read(encode, encoder, tokens)
        beams = spread(**{name: read_all[name] for name in states})
        found = decode(
            max_steps=decoding.max_steps(len(tokens)),
            token=decoding.go,
            parent=0,
            total=total,
            length=0,
            **{name: beams[name] for name in states},
        )
        return Graph(
            outputs={
                "beam_tokens": found.steps("token"),
                "beam_parents": found.steps("parent"),
                "beam_lengths": found["length"],
                "beam_scores": found["score"],
            },
            then=_hypotheses,
        )

    return CellModel((encode, spread, decode), unfold)


@final
class Searching(nnx.Module):
    """A step of a beam search, in which each row holds `num_beams` hypotheses of a request.

    Hypotheses are in the order of their scores. Each row of `state` is [num_beams, hidden_size],
    the states of the previous step's hypotheses; `parent` says which of them each hypothesis
    extends. So a GPU's kernel reads states in place, and they are never rearranged.

    Its outputs are the new states, `token`, `parent`, `total` (the sum of the logarithms of the
    probabilities), `length`, and `score`, each [batch, num_beams].
    """

    def __init__(
        self, predicting: Predicting, num_beams: int, end: int | None, length_penalty: float
    ):
        self.predicting = predicting
        self.num_beams, self.end, self.length_penalty = num_beams, end, length_penalty

    def inputs(self) -> dict[str, ValueSpec]:
        beams, hidden = self.num_beams, self.predicting.embedded.hidden_size
        whole = ValueSpec((beams,), np.dtype(np.int32))
        state = ValueSpec((beams, hidden), np.dtype(np.float32))
        return {
            "token": whole,
            "parent": whole,
            "total": ValueSpec((beams,), np.dtype(np.float32)),
            "length": whole,
            **dict.fromkeys(self.predicting.embedded.state, state),
        }

    def __call__(
        self, token: Batch, parent: Batch, total: Batch, length: Batch, **state: Batch
    ) -> dict[str, jax.Array]:
        token, parent, total, length = map(_gathered, (token, parent, total, length))
        rows = {name: _rows_of_parents(one, parent) for name, one in state.items()}
        found, logits = self.predicting.logits(token.reshape(-1), **rows)
        new_states = {name: found[name].reshape(*token.shape, -1) for name in state}
        return {**new_states, **self._best(token, total, length, logits)}

    def _best(
        self,
        token: Int32[Array, "batch beams"],
        total: Float32[Array, "batch beams"],
        length: Int32[Array, "batch beams"],
        logits: Float32[Array, "rows vocab"],
    ) -> dict[str, jax.Array]:
        num = self.num_beams
        largest, next_token = top_k(logits, num)
        gain = largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        gain, next_token = (one.reshape(*token.shape, num) for one in (gain, next_token))
        if self.end is not None:
            # A hypothesis that has ended stays unchanged. The first token may be the end token.
            has_ended = ((token == self.end) & (length > 0))[:, :, None]
            as_it_is = jnp.where(jnp.arange(num) == 0, 0.0, _NEVER)
            gain = jnp.where(has_ended, as_it_is, gain)
            next_token = jnp.where(has_ended, jnp.int32(self.end), next_token)
            length = length + (~has_ended[:, :, 0]).astype(jnp.int32)
        else:
            length = length + 1
        totals = total[:, :, None] + gain
        scores = totals / _penalty(length, self.length_penalty)[:, :, None]
        score, place = lax.top_k(scores.reshape(len(token), -1), num)
        parent = place // num

        def chosen(of_all: jax.Array) -> jax.Array:
            return jnp.take_along_axis(of_all.reshape(len(token), -1), place, axis=1)

        return {
            "token": chosen(next_token),
            "parent": parent,
            "total": chosen(totals),
            "length": jnp.take_along_axis(length, parent, axis=1),
            "score": score,
        }


@final
class _Spread(nnx.Module):
    """The states of a request [hidden_size], given to each of its beams."""

    def __init__(self, num_beams: int):
        self.num_beams = num_beams

    def __call__(self, **state: jax.Array) -> dict[str, jax.Array]:
        return {
            name: jnp.broadcast_to(one[:, None], (len(one), self.num_beams, one.shape[1]))
            for name, one in state.items()
        }


def _gathered(given: Batch) -> jax.Array:
    return given.gathered() if isinstance(given, RowsAt) else given


def _rows_of_parents(state: Batch, parent: Int32[Array, "batch beams"]) -> RowsAt:
    batch, num_beams = parent.shape
    rows = state if isinstance(state, RowsAt) else RowsAt(state)
    index = jnp.arange(batch, dtype=jnp.int32) if rows.index is None else rows.index
    places = index[:, None] * num_beams + parent
    return RowsAt(rows.values.reshape(-1, rows.values.shape[-1]), places.reshape(-1))


def _penalty(length: jax.Array, exponent: float) -> jax.Array:
    return ((5.0 + length.astype(jnp.float32)) / 6.0) ** jnp.float32(exponent)


def _hypotheses(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    tokens, parents = values["beam_tokens"], values["beam_parents"]  # [steps, beams]
    found = np.empty_like(tokens.T)
    beam = np.arange(tokens.shape[1])
    for step in reversed(range(len(tokens))):
        found[:, step] = tokens[step, beam]
        beam = parents[step, beam]
    scores = values["beam_scores"]
    best = found[0, : values["beam_lengths"][0]]
    return {"token": best, "score": scores[0], "tokens": found, "scores": scores}
