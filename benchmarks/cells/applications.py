"""The thesis's applications: their requests, and their cells with and without modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from jaxserve.cells import Graph, SimulatedCell
from jaxserve.cells.base import BaseCell
from jaxserve.cells.tree_shape import numbered
from jaxserve.cells.values import ValueSpec
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.sentences import target_lengths
from jaxserve.workload.trees import Tree, complete_tree, random_trees, with_tokens

APPLICATIONS = ("lstm", "seq2seq", "treelstm", "identical_trees")


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """An application of the thesis and the conditions of one of its figures.

    Attributes:
      length: of all sentences; None for a distribution.
      longest: the longest sentence of the distribution; None for all.
      max_batch: of every cell under every policy except merged graphs; None for those of `Sizes`.
      num_workers: devices. More than one are simulated only.
    """

    application: str
    length: int | None = None
    longest: int | None = None
    max_batch: int | None = None
    num_workers: int = 1


WORKLOADS = {
    **{application: Workload(application=application) for application in APPLICATIONS},
    "lstm_batch_64": Workload(application="lstm", max_batch=64),  # figure 2.7 (b)
    # Figure 2.11.
    "lstm_24_words": Workload(application="lstm", length=24),
    "lstm_to_50_words": Workload(application="lstm", longest=50),
    "lstm_to_100_words": Workload(application="lstm", longest=100),
    # Figure 2.13.
    "seq2seq_2_devices": Workload(application="seq2seq", num_workers=2),
    "seq2seq_4_devices": Workload(application="seq2seq", num_workers=4),
    # Figures 2.14 and 2.15, where the thesis limits BatchMaker to the number of merged graphs.
    "treelstm_batch_64": Workload(application="treelstm", max_batch=64),
    "identical_trees_batch_64": Workload(application="identical_trees", max_batch=64),
}
# How many more tokens than the input a decoder may run (thesis, 2.7.4).
_MORE_STEPS = 50
_COUNT, _STATE = ValueSpec((), np.dtype(np.int32)), ValueSpec((1,), np.dtype(np.float32))


@final
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the modules, and the largest batches of each cell.

    Attributes:
      max_batch: by cell. BatchMaker, LazyBatching and padding have these.
    """

    hidden_size: int
    vocab_size: int
    max_batch: Mapping[str, int]

    def limited(self, most: int | None) -> Sizes:
        """Return the sizes with batches of at most a number; None for no further limit."""
        if most is None:
            return self
        limits = {cell: min(most, largest) for cell, largest in self.max_batch.items()}
        return replace(self, max_batch=limits)


# 2.7.1, 2.7.4 and 2.7.5, and a size that two cores compute.
SIZES = {
    "thesis": Sizes(
        hidden_size=1024,
        vocab_size=30_000,
        # The sizes of LSTM and Seq2Seq are the thesis's. Those of trees are as large, since merged
        # graphs have larger ones.
        max_batch={"lstm": 512, "encoder": 512, "decoder": 256, "leaf": 512, "internal": 512},
    ),
    "small": Sizes(
        hidden_size=128,
        vocab_size=2_000,
        max_batch={"lstm": 64, "encoder": 64, "decoder": 64, "leaf": 64, "internal": 64},
    ),
}


@final
@dataclass(frozen=True)
class CellRequest:
    """A sentence or a tree.

    Attributes:
      tokens: the sentence's; empty for a tree.
      num_output_tokens: tokens of the answer of Seq2Seq, which no policy knows; 0 otherwise.
    """

    tokens: tuple[int, ...] = ()
    tree: Tree | None = None
    num_output_tokens: int = 0

    @property
    def max_steps(self) -> int:
        """The most decoder steps, which policies know."""
        return max(len(self.tokens) + _MORE_STEPS, self.num_output_tokens)

    def counts(self) -> dict[str, int]:
        """Return how often each cell runs for it."""
        if self.tree is not None:
            tokens, _ = numbered(self.tree)
            return {"leaf": len(tokens), "internal": len(tokens) - 1}
        if self.num_output_tokens:
            return {"encoder": len(self.tokens), "decoder": self.num_output_tokens}
        return {"lstm": len(self.tokens)}


@final
@dataclass(frozen=True)
class Simulated:
    """Cells without modules, and the function that unfolds a request into their graph."""

    cells: tuple[BaseCell, ...]
    unfold: Callable[[CellRequest], Graph]


def requests_of(
    application: str, lengths: Sequence[int], *, vocab_size: int, seed: int
) -> list[CellRequest]:
    """Return a request for each sentence length; identical trees have 16 words each."""
    random = np.random.default_rng([seed, 3])

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab_size, num).tolist())

    if application == "lstm":
        return [CellRequest(tokens(num)) for num in lengths]
    if application == "seq2seq":
        targets = target_lengths(list(lengths), seed)
        return [
            CellRequest(tokens(num), None, out) for num, out in zip(lengths, targets, strict=True)
        ]
    if application == "treelstm":
        trees = random_trees(lengths, seed)
        pairs = zip(trees, lengths, strict=True)
        return [CellRequest(tree=with_tokens(tree, tokens(num))) for tree, num in pairs]
    if application == "identical_trees":
        return [CellRequest(tree=with_tokens(complete_tree(16), tokens(16))) for _ in lengths]
    raise InvalidConfigError(f"application {application!r} is unknown; pass one of {APPLICATIONS}")


def simulated(application: str, batch_sizes: Mapping[str, Sequence[int]]) -> Simulated:
    """Return an application for simulations, which need no weights.

    Args:
      batch_sizes: compiled sizes by cell.
    """
    state = {"h": _STATE}

    def cell(name: str, inputs: Mapping[str, ValueSpec], **more: Any) -> SimulatedCell:
        return SimulatedCell(name, inputs, state, batch_sizes=batch_sizes[name], **more)

    def chain(cell: SimulatedCell, request: CellRequest) -> Any:
        return cell.chain({"token": request.tokens}, {"h": "h"}, h=0.0)["h"]

    if application == "lstm":
        lstm = cell("lstm", {"token": _COUNT, **state})
        return Simulated((lstm,), lambda request: Graph({"h": chain(lstm, request)}))
    if application == "seq2seq":
        encoder = cell("encoder", {"token": _COUNT, **state})
        # The first word of a node is its number of steps, which the simulation knows.
        decoder = cell("decoder", {"num_steps": _COUNT, **state}, priority=1, is_loop=True)

        def translate(request: CellRequest) -> Graph:
            steps, h = request.num_output_tokens, chain(encoder, request)
            node = decoder(max_steps=request.max_steps, num_steps=steps, h=h)
            return Graph({"h": node["h"]})

        return Simulated((encoder, decoder), translate)
    leaf = cell("leaf", {"token": _COUNT})
    internal = cell("internal", {"left": _STATE, "right": _STATE}, priority=1)

    def parse(request: CellRequest) -> Graph:
        assert request.tree is not None
        tokens, pairs = numbered(request.tree)
        sides = {"left": {"left": "h"}, "right": {"right": "h"}}
        return Graph({"h": internal.tree(leaf, {"token": tokens}, pairs, **sides)["h"]})

    return Simulated((leaf, internal), parse)
