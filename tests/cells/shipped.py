"""The models that ship, with small random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.models import (
    GRU,
    LSTM,
    CellModel,
    Decoding,
    Embedded,
    Internal,
    Leaf,
    Predicting,
    Stacked,
    beam_search_model,
    folded,
    seq2seq_model,
    sequence_model,
    tree_lstm_model,
)


def model_of(
    kind: str, *, vocab: int, embed: int, hidden: int, sizes: Sequence[int] = BATCH_SIZES
) -> CellModel:
    """Return a model of a kind: "tree", or "lstm" or "gru" with "seq2seq" or "beam_search".

    Steps that are "stacked" have two layers. With "folded" the embeddings are.
    """
    rngs = nnx.Rngs(0)
    fold: Any = folded if "folded" in kind else lambda module: module
    if "tree" in kind:
        leaf = fold(Leaf(vocab, embed, hidden, rngs=rngs))
        internal = Internal(hidden, rngs=rngs)
        return tree_lstm_model(leaf, internal, leaf_batch_sizes=sizes, internal_batch_sizes=sizes)
    step = GRU if "gru" in kind else LSTM

    def reader() -> Any:
        layers = [step(embed, hidden, rngs=rngs)]
        if "stacked" in kind:
            layers.append(step(hidden, hidden, rngs=rngs))
        return fold(Embedded(Stacked(layers) if layers[1:] else layers[0], vocab, rngs=rngs))

    if "seq2seq" not in kind and "beam_search" not in kind:
        return sequence_model(reader(), batch_sizes=sizes)
    parts = reader(), Predicting(reader(), rngs=rngs)
    decoding = Decoding(go=0, end=1, max_steps=lambda num: num + 5)
    options: Any = {"encoder_batch_sizes": sizes, "decoder_batch_sizes": sizes}
    if "beam_search" in kind:
        return beam_search_model(*parts, decoding, num_beams=4, **options)
    return seq2seq_model(*parts, decoding, **options)
