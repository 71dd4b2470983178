"""Recurrent layers: the state of a sequence, and how a batch of rows advances it.

A recurrent layer keeps a state of a fixed size for each sequence, where attention keeps keys and
values of every token. States are in the slots of the engine: [layers, slots, ...]. A layer defines
how one sequence advances (`Advance`); the functions here do that for the rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxserve.kernels import Rows, dispatch

# The longest run of tokens that one call of an `Advance` gets. Longer rows take several calls.
PIECE = 64
# Rows of one token that a mixed step advances together. Slots without such a row cost nothing.
GROUP = 32
# Numbers of a state from which on rows of one token are computed one after another on CPUs, where
# XLA's gathers and scatters of states cost more than the rest of such a layer.
_SMALL = 1 << 14

# The arrays of a state, by name: of one sequence in one layer, or of the slots of some layers.
State = Mapping[str, Shaped[Array, "..."]]
Inputs = Mapping[str, Float[Array, "tokens ..."]]

# (state, inputs of a run of tokens, how many of these tokens are valid) -> (outputs, state).
# Inputs after the valid tokens are zero, and change no state.
Advance = Callable[[State, Inputs, Int32[Array, ""]], tuple[Float[Array, "tokens ..."], State]]


# Shape and dtype of each array of one sequence's state in one layer.
Arrays = Mapping[str, tuple[tuple[int, ...], jax.typing.DTypeLike]]

# Each `Advance` of a layer, with the arrays of the state that it reads and returns.
Advances = Sequence[tuple[Advance, Arrays]]


class Mixer(Protocol):
    """The part of a recurrent layer that mixes tokens: the block's `mixer`."""

    @property
    def advances(self) -> Advances:
        """Return what a call gives to `LayerContext.recur` with its inputs, in this order."""
        ...

    def __call__(self, x: Float[Array, "tokens embed"], context: Any) -> Any:
        """Return the mixer's addition to the residual stream, for `x` after the norm."""
        ...


class Recurrence(Protocol):
    """The sizes of a kind of recurrent layer: frozen and hashable."""

    def mixer(self, config: Any, new: Any) -> Mixer:
        """Return the part of a layer that mixes tokens (`layers.RecurrentBlock`)."""
        ...

    def arrays(self, dtype: jax.typing.DTypeLike) -> Arrays:
        """Return shape and dtype of each array of one sequence's state in one layer.

        A sequence begins with zeros. `dtype` is that of the activations.
        """
        ...


def advance_rows(
    advance: Advance,
    inputs: Inputs,
    states: State,  # [layers, slots, ...]
    layer: int | Int32[Array, ""],
    slot: Int32[Array, " rows"],  # of each row; no two rows with tokens have the same one
    rows: Rows,
    *,
    most: int | None = None,
    writes: bool = True,
    longest: int = PIECE,  # maximum number of tokens of a piece
    group: int = GROUP,
    in_turn: bool | None = None,
) -> tuple[Float[Array, "tokens ..."], State]:
    """Advance the sequence of each row by the row's tokens, from zeros if it begins at position 0.

    Rows of at most `most` tokens are computed together. In other batches, rows of one token are
    computed group by group, and longer rows one after another, in pieces. Only their states are
    read and written.

    Args:
      most: the largest number of tokens of a row, such as 1 in a decode batch; None for any.
      writes: False returns the states as they were, which needs `most`.
      group: maximum number of one-token rows that are computed together, without `most`.
      in_turn: whether rows of one token are computed one after another, too; None for the
        platform's choice.

    Returns:
      The outputs, zeros for tokens of no row, and the states after the rows. Slots without tokens
      keep their states.
    """
    assert writes or most is not None, "a row of several pieces needs the states between them"
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    piece = most or min(longest, num_tokens)
    shape = jax.eval_shape(
        advance,
        {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in states.items()},
        {name: jax.ShapeDtypeStruct((piece, *x.shape[1:]), x.dtype) for name, x in inputs.items()},
        jax.ShapeDtypeStruct((), jnp.int32),
    )[0]
    outputs = jnp.zeros((num_tokens, *shape.shape[1:]), shape.dtype)
    if in_turn is None:
        sizes = [math.prod(leaf.shape[2:]) for leaf in states.values()]
        in_turn = dispatch.target_platform() == "cpu" and sum(sizes) > _SMALL
    length = rows.query_length
    runs = _Runs(slot, rows.query_start, length, rows.first_position == 0)
    if most is not None:
        run = _advance_in_turn if in_turn else _advance_together
        return run(advance, inputs, outputs, states, layer, runs, piece, writes=writes)
    long = runs._replace(length=jnp.where(length > 1, length, 0))
    state = _advance_in_turn(advance, inputs, outputs, states, layer, long, piece)
    single = runs._replace(length=jnp.where(length == 1, 1, 0))
    if in_turn:
        return _advance_in_turn(advance, inputs, *state, layer, single, 1)
    return _advance_single(advance, inputs, *state, layer, single, group)


class _Runs(NamedTuple):
    """Tokens of some rows, none if `length` is 0; a row begins a sequence, or continues it."""

    slot: Int32[Array, " rows"]
    start: Int32[Array, " rows"]
    length: Int32[Array, " rows"]
    begins: Bool[Array, " rows"]


def advance_whole(
    advance: Advance,
    inputs: Inputs,
    length: int,
    arrays: Arrays,
    *,
    longest: int = PIECE,
) -> Float[Array, "tokens ..."]:
    """Return the outputs of whole sequences of one length, one after another; differentiable.

    `arrays` are those of `Recurrence`; a piece has at most `longest` tokens.
    """
    num_sequences = jax.tree.leaves(inputs)[0].shape[0] // length
    piece = min(longest, length)
    num_pieces = -(-length // piece)

    def pieces(x: Float[Array, "tokens ..."]) -> Float[Array, "pieces sequences piece ..."]:
        whole = x.reshape(num_sequences, length, *x.shape[1:])
        rest = num_pieces * piece - length
        whole = jnp.pad(whole, [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 1)])
        cut = whole.reshape(num_sequences, num_pieces, piece, *x.shape[1:])
        return jnp.moveaxis(cut, 1, 0)

    def one(state: State, each: tuple[Inputs, Int32[Array, ""]]) -> tuple[State, Any]:
        outputs, state = jax.vmap(advance, in_axes=(0, 0, None))(state, *each)
        return state, outputs

    start = {
        name: jnp.zeros((num_sequences, *shape), dtype) for name, (shape, dtype) in arrays.items()
    }
    counts = jnp.minimum(length - jnp.arange(num_pieces) * piece, piece)
    _, outputs = lax.scan(one, start, (jax.tree.map(pieces, dict(inputs)), counts))
    joined = jnp.moveaxis(outputs, 0, 1).reshape(num_sequences, -1, *outputs.shape[3:])
    return joined[:, :length].reshape(num_sequences * length, *outputs.shape[3:])


def computed_once(x: Float[Array, "first ..."]) -> Float[Array, "first ..."]:
    """Return `x` from an operation that XLA does not fuse with its users.

    On the CPU, XLA would compute it again for each number of a state that it changes.
    """
    if dispatch.target_platform() != "cpu":
        return x
    return jnp.take(x, jnp.arange(x.shape[0]), axis=0, mode="clip")


def _advance_single(
    advance: Advance,
    inputs: Inputs,
    outputs: Float[Array, "tokens ..."],
    states: State,
    layer: int | Int32[Array, ""],
    runs: _Runs,
    group: int,
) -> tuple[Float[Array, "tokens ..."], State]:
    """Advance the rows that have a token, one each, group by group."""
    num_rows = runs.slot.shape[0]
    size = min(group, num_rows, outputs.shape[0])
    num_single = jnp.sum(runs.length)
    # Rows with a token come first; the last group is filled with row 0.
    (order,) = jnp.nonzero(runs.length, size=-(-num_rows // size) * size, fill_value=0)

    def one(index: Int32[Array, ""], carry: tuple[Any, State]) -> tuple[Any, State]:
        row = lax.dynamic_slice_in_dim(order, index * size, size)
        is_there = index * size + jnp.arange(size) < num_single
        some = jax.tree.map(lambda x: x[row], runs)._replace(length=is_there.astype(jnp.int32))
        return _advance_together(advance, inputs, *carry, layer, some, 1)

    return lax.fori_loop(0, -(-num_single // size), one, (outputs, dict(states)))


def _advance_together(
    advance: Advance,
    inputs: Inputs,
    outputs: Float[Array, "tokens ..."],
    states: State,
    layer: int | Int32[Array, ""],
    runs: _Runs,  # of at most `piece` tokens
    piece: int,
    *,
    writes: bool = True,
) -> tuple[Float[Array, "tokens ..."], State]:
    """Advance all rows at once."""
    slot, start, length, begins = runs
    own = {name: _begun(leaf[layer, slot], begins) for name, leaf in states.items()}
    place = start[:, None] + jnp.arange(piece)
    is_there = jnp.arange(piece) < length[:, None]

    def there(x: Shaped[Array, "tokens ..."]) -> Shaped[Array, "rows piece ..."]:
        mask = is_there.reshape(*is_there.shape, *[1] * (x.ndim - 1))
        return jnp.where(mask, x[jnp.minimum(place, len(x) - 1)], jnp.zeros((), x.dtype))

    out, own = jax.vmap(advance)(own, {name: there(x) for name, x in inputs.items()}, length)
    outputs = outputs.at[jnp.where(is_there, place, len(outputs))].set(out, mode="drop")
    if not writes:
        return outputs, states
    return outputs, {
        name: leaf.at[layer, jnp.where(length > 0, slot, leaf.shape[1])].set(own[name], mode="drop")
        for name, leaf in states.items()
    }


def _advance_in_turn(
    advance: Advance,
    inputs: Inputs,
    outputs: Float[Array, "tokens ..."],
    states: State,
    layer: int | Int32[Array, ""],
    runs: _Runs,
    piece: int,
    *,
    writes: bool = True,
) -> tuple[Float[Array, "tokens ..."], State]:
    """Advance one row after another, piece by piece."""
    slot, query_start, length, begins = runs
    num_tokens = outputs.shape[0]
    num_pieces = -(-length // piece)
    ends = jnp.cumsum(num_pieces)
    # The last piece may extend past the end of the batch.
    padded = {name: _padded(x, piece) for name, x in inputs.items()}

    def one(index: Int32[Array, ""], carry: tuple[Any, State]) -> tuple[Any, State]:
        outputs, states = carry
        row = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        offset = (index - (ends[row] - num_pieces[row])) * piece
        start = query_start[row] + offset
        count = jnp.minimum(length[row] - offset, piece)
        is_inside = jnp.arange(piece) < count

        def inside(x: Shaped[Array, "piece ..."], other: Any) -> Shaped[Array, "piece ..."]:
            mask = is_inside.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(mask, x, other)

        tokens = {
            name: inside(lax.dynamic_slice_in_dim(x, start, piece), jnp.zeros((), x.dtype))
            for name, x in padded.items()
        }
        is_first = begins[row] & (offset == 0)
        places = {name: (layer, slot[row], *[0] * (x.ndim - 2)) for name, x in states.items()}
        own = {
            name: lax.dynamic_slice(leaf, places[name], (1, 1, *leaf.shape[2:]))[0, 0]
            for name, leaf in states.items()
        }
        # Read once, before the place is written: XLA would copy the states of all slots otherwise.
        own = {name: computed_once(_begun(leaf, is_first)) for name, leaf in own.items()}
        out, own = advance(own, tokens, count)
        out = inside(out, lax.dynamic_slice_in_dim(outputs, start, piece))
        outputs = lax.dynamic_update_slice_in_dim(outputs, out, start, 0)
        if not writes:
            return outputs, states
        return outputs, {
            name: lax.dynamic_update_slice(leaf, own[name][None, None], places[name])
            for name, leaf in states.items()
        }

    start = _padded(outputs, piece), dict(states)
    outputs, states = lax.fori_loop(0, ends[-1], one, start)
    return outputs[:num_tokens], states


def _begun(state: Shaped[Array, ...], begins: Bool[Array, ...]) -> Shaped[Array, ...]:
    """Return zeros where a sequence begins, and its state elsewhere."""
    begins = begins.reshape(*begins.shape, *[1] * (state.ndim - begins.ndim))
    return jnp.where(begins, jnp.zeros((), state.dtype), state)


def _padded(x: Shaped[Array, "tokens ..."], count: int) -> Shaped[Array, "more ..."]:
    return jnp.pad(x, [(0, count), *[(0, 0)] * (x.ndim - 1)])
