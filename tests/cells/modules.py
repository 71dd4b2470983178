"""Small Flax cells, graphs of them, and the same computed one node after the other."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.cells import Cell, Graph, Node, Repeat

# Over 64 bytes, so that constants of it take slots.
SIZE = 20
VOCAB = 13
STATE = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
TOKEN = jax.ShapeDtypeStruct((), jnp.int32)
END = 3
SIZES = (1, 4)


class Embed(nnx.Module):
    """Token to vector."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(VOCAB, SIZE, rngs=rngs)

    def __call__(self, token):
        return {"x": self.table(token)}


class Recurrent(nnx.Module):
    """A step of a gated recurrent network with two states."""

    def __init__(self, rngs: nnx.Rngs):
        self.gates = nnx.Linear(2 * SIZE, 2 * SIZE, rngs=rngs)

    def __call__(self, x, h, c):
        gate, new = jnp.split(self.gates(jnp.concatenate([x, h], axis=-1)), 2, axis=-1)
        c = jax.nn.sigmoid(gate) * c + jnp.tanh(new)
        return {"h": jnp.tanh(c), "c": c}


class Merge(nnx.Module):
    """An inner node of a tree."""

    def __init__(self, rngs: nnx.Rngs):
        self.both = nnx.Linear(2 * SIZE, SIZE, rngs=rngs)

    def __call__(self, left, right):
        return {"h": jnp.tanh(self.both(jnp.concatenate([left, right], axis=-1)))}


class Decoder(nnx.Module):
    """A step that takes the last token and returns the next one."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(VOCAB, SIZE, rngs=rngs)
        self.step = nnx.Linear(2 * SIZE, SIZE, rngs=rngs)
        self.head = nnx.Linear(SIZE, VOCAB, rngs=rngs)

    def __call__(self, token, h, bias):
        h = jnp.tanh(self.step(jnp.concatenate([self.table(token), h], axis=-1)) + bias)
        logits = self.head(h)
        return {"token": jnp.argmax(logits, axis=-1).astype(jnp.int32), "h": h, "logits": logits}


class Root(nnx.Module):
    """The square root, which is NaN for negative numbers, of one of two numbers."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x, number, use):
        chosen = jnp.where(use, x, number.astype(jnp.float32))
        return {"x": jnp.sqrt(chosen) * self.scale[...]}


def is_end(outputs):
    """Whether the token ends an answer."""
    return outputs["token"] == END


def cells(sizes: Sequence[int] = SIZES) -> dict[str, Cell | Repeat]:
    """Return one cell of each module above, with random weights."""
    rngs = nnx.Rngs(0)
    decoder = Cell(
        Decoder(rngs),
        {"token": TOKEN, "h": STATE, "bias": STATE},
        name="decoder",
        priority=2,
        batch_sizes=sizes,
    )
    number = jax.ShapeDtypeStruct((), jnp.float32)
    small = jax.ShapeDtypeStruct((), jnp.int16)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    found = [
        Cell(Embed(rngs), {"token": TOKEN}, name="embed", batch_sizes=sizes),
        Cell(
            Recurrent(rngs),
            {"x": STATE, "h": STATE, "c": STATE},
            name="recurrent",
            priority=1,
            batch_sizes=sizes,
        ),
        Cell(
            Merge(rngs),
            {"left": STATE, "right": STATE},
            name="merge",
            priority=1,
            batch_sizes=sizes,
        ),
        decoder,
        Repeat(
            decoder, {"token": "token", "h": "h"}, is_end, emits=["token", "logits"], name="decode"
        ),
        Cell(Root(), {"x": number, "number": small, "use": flag}, name="root", batch_sizes=sizes),
    ]
    return {cell.name: cell for cell in found}


def sentence_graph(all_cells, tokens: Sequence[int], *, every_step: bool = False) -> Graph:
    """Return a chain over embedded tokens."""
    embed, recurrent = all_cells["embed"], all_cells["recurrent"]
    nodes = [recurrent(x=embed(token=tokens[0])["x"], h=0.0, c=0.0)]
    for token in tokens[1:]:
        last = nodes[-1]
        nodes.append(recurrent(x=embed(token=token)["x"], h=last["h"], c=last["c"]))
    outputs = {"h": nodes[-1]["h"], "c": nodes[-1]["c"]}
    if every_step:
        outputs["all"] = [node["h"] for node in nodes]
    return Graph(outputs)


def tree_graph(all_cells, tree) -> Graph:
    """Return the graph of a tree of tokens: a token, or a pair of trees."""

    def node(part) -> Node:
        if isinstance(part, int):
            return all_cells["embed"](token=part)
        left, right = (node(child) for child in part)
        outputs = [n["h"] if n.cell.name == "merge" else n["x"] for n in (left, right)]
        return all_cells["merge"](left=outputs[0], right=outputs[1])

    return Graph({"h": node(tree)["h"]})


def distance(value, expected) -> float:
    """Return the relative distance of two arrays."""
    return float(np.linalg.norm(np.subtract(value, expected)) / (np.linalg.norm(expected) + 1e-9))
