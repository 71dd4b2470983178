"""The thesis's applications: their requests, and their cells with and without modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from jaxserve.cells import Graph, SimulatedCell
from jaxserve.cells.base import BaseCell
from jaxserve.cells.tree_shape import numbered
from jaxserve.cells.values import ValueSpec
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.sentences import target_lengths
from jaxserve.workload.trees import Tree, complete_tree, random_trees, with_tokens

if TYPE_CHECKING:
    from jaxserve.cells.models import CellModel

APPLICATIONS = ("lstm", "seq2seq", "treelstm", "identical_trees")


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """An application of the thesis and the conditions of one of its figures.

    Attributes:
      application: one of `APPLICATIONS`.
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
            num_leaves = _num_leaves(self.tree)
            return {"leaf": num_leaves, "internal": num_leaves - 1}
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
    reads = {"token": _COUNT, **state}
    if application == "lstm":
        lstm = SimulatedCell("lstm", reads, state, batch_sizes=batch_sizes["lstm"])
        return Simulated((lstm,), lambda request: Graph({"h": _chain(lstm, request.tokens)["h"]}))
    if application == "seq2seq":
        encoder = SimulatedCell("encoder", reads, state, batch_sizes=batch_sizes["encoder"])
        decoder = SimulatedCell(
            "decoder",
            # The first word of a node is its number of steps, see `decoder_steps`.
            {"num_steps": _COUNT, **state},
            state,
            priority=1,
            batch_sizes=batch_sizes["decoder"],
            is_loop=True,
        )

        def translate(request: CellRequest) -> Graph:
            node = decoder(
                max_steps=request.max_steps,
                num_steps=request.num_output_tokens,
                h=_chain(encoder, request.tokens)["h"],
            )
            return Graph({"h": node["h"]})

        return Simulated((encoder, decoder), translate)
    leaf = SimulatedCell("leaf", {"token": _COUNT}, state, batch_sizes=batch_sizes["leaf"])
    internal = SimulatedCell(
        "internal",
        {"left": _STATE, "right": _STATE},
        state,
        priority=1,
        batch_sizes=batch_sizes["internal"],
    )

    def parse(request: CellRequest) -> Graph:
        assert request.tree is not None
        tokens, pairs = numbered(request.tree)
        sides = {"left": {"left": "h"}, "right": {"right": "h"}}
        return Graph({"h": internal.tree(leaf, {"token": tokens}, pairs, **sides)["h"]})

    return Simulated((leaf, internal), parse)


def decoder_steps(graph: Any, node: int) -> int:
    """Return the steps of a simulated decoder's node, for `simulate_cells`."""
    return int(graph.words[node][0])


def modelled(application: str, sizes: Sizes, batch_sizes: Mapping[str, Sequence[int]]) -> CellModel:
    """Return an application with modules of random weights; its inputs are `CellRequest`s."""
    from flax import nnx

    from benchmarks.cells.models import counted_seq2seq
    from jaxserve.cells import models

    rngs, hidden, vocab = nnx.Rngs(0), sizes.hidden_size, sizes.vocab_size

    def embedded() -> models.Embedded:
        return models.Embedded(models.LSTM(hidden, hidden, rngs=rngs), vocab, rngs=rngs)

    if application == "lstm":
        lstm = models.sequence_model(embedded(), name="lstm", batch_sizes=batch_sizes["lstm"])
        return models.CellModel(lstm.cells, lambda request: lstm.unfold(request.tokens))
    if application == "seq2seq":
        decoder = models.Predicting(embedded(), rngs=rngs)
        return counted_seq2seq(embedded(), decoder, batch_sizes)
    tree = models.tree_lstm_model(
        models.Leaf(vocab, hidden, hidden, rngs=rngs),
        models.Internal(hidden, rngs=rngs),
        leaf_batch_sizes=batch_sizes["leaf"],
        internal_batch_sizes=batch_sizes["internal"],
    )
    return models.CellModel(tree.cells, lambda request: tree.unfold(request.tree))


def _chain(cell: SimulatedCell, tokens: Sequence[int]) -> Any:
    return cell.chain({"token": tokens}, {"h": "h"}, h=0.0)


def _num_leaves(tree: Tree) -> int:
    num, open = 0, [tree]
    while open:
        part = open.pop()
        if isinstance(part, tuple):
            open += part
        else:
            num += 1
    return num
