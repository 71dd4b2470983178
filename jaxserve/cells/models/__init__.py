"""Models of cells: LSTM, GRU, Seq2Seq, beam search, binary TreeLSTM, and letters to phonemes.

Each is a `CellModel`, whose `cells` and `unfold` a `CellRuntime` takes.
"""

from jaxserve.cells.models.beam_search import Searching, beam_search_model
from jaxserve.cells.models.bundle import CellModel
from jaxserve.cells.models.folding import FoldedLeaf, FoldedLSTM, folded
from jaxserve.cells.models.g2p import G2P, load_g2p
from jaxserve.cells.models.recurrent import GRU, LSTM, Embedded, Predicting, Stacked
from jaxserve.cells.models.seq2seq import Decoding, seq2seq_model, sequence_model
from jaxserve.cells.models.tree_lstm import Internal, Leaf, Tree, tree_lstm_model

__all__ = [
    "CellModel",
    "Decoding",
    "Embedded",
    "FoldedLSTM",
    "FoldedLeaf",
    "G2P",
    "GRU",
    "Internal",
    "LSTM",
    "Leaf",
    "Predicting",
    "Searching",
    "Stacked",
    "Tree",
    "beam_search_model",
    "folded",
    "load_g2p",
    "seq2seq_model",
    "sequence_model",
    "tree_lstm_model",
]
