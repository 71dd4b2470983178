"""Letters to phonemes: the trained GRU encoder-decoder of the package `g2p-en`.

Park and Kim, https://github.com/Kyubyong/g2p: a GRU encoder reads a word's letters, and a GRU
decoder returns at most 20 ARPAbet phonemes with their stress, until its end symbol. It has 0.83
million float32 parameters, trained on the CMU pronouncing dictionary. The package looks words up in
that dictionary first; this is the network alone, which it uses for other words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.graph import Graph
from jaxserve.cells.models.bundle import CellModel
from jaxserve.cells.models.seq2seq import Decoding, seq2seq_model
from jaxserve.cells.models.torch_weights import (
    embedded_from_torch,
    gru_from_torch,
    predicting_from_torch,
)
from jaxserve.core.assets import WheelFile, fetch
from jaxserve.core.errors import InvalidGraphError

WEIGHTS = WheelFile(
    package="g2p-en",
    version="2.1.0",
    member="g2p_en/checkpoint20.npz",
    size_bytes=3_342_298,
    sha256="b8af35e4596d8dd5836dfd3fe9b2ba4f97b9c311efe8879544cbcfcbd566d8c6",
    wheel_bytes=3_117_464,
    license="Apache-2.0",
)

_VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW".split()
_CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH".split()
# In the order of the published tables.
LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
PHONEMES = (
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    *sorted([*_CONSONANTS, "UW", *(vowel + stress for vowel in _VOWELS for stress in "012")]),
)
_LETTER_IDS = {letter: number for number, letter in enumerate(LETTERS)}
_UNKNOWN, _WORD_END = _LETTER_IDS["<unk>"], _LETTER_IDS["</s>"]
_GO, _END = PHONEMES.index("<s>"), PHONEMES.index("</s>")
_MAX_PHONEMES = 20


@final
@dataclass(frozen=True)
class G2P:
    """The network as a model of cells; its inputs are words.

    g2p = load_g2p()
    with CellRuntime(g2p.model.cells, g2p.model.unfold) as rt:
        for word, done in zip(words, rt.generate(words)):
            print(word, *g2p.phonemes(done["token"]))
    """

    model: CellModel

    def phonemes(self, tokens: np.ndarray) -> list[str]:
        """Return the phonemes of the result `token`, without the end symbol."""
        return [PHONEMES[token] for token in tokens.tolist() if token != _END]


def load_g2p(*, batch_sizes: Sequence[int] = BATCH_SIZES, progress: bool = True) -> G2P:
    """Return the network with its published weights, which are downloaded on first use.

    Raises:
      DownloadError, ModelCacheError: see `fetch`.
    """
    with np.load(fetch(WEIGHTS, progress=progress)) as published:
        return g2p_from(published, batch_sizes=batch_sizes)


def g2p_from(tensors: Mapping[str, np.ndarray], *, batch_sizes: Sequence[int]) -> G2P:
    """Return the network with weights under the names of the published file.

    Raises:
      CheckpointError: tensors are missing or have wrong shapes.
    """
    named = {_PUBLISHED.get(name, name): tensors[name] for name in tensors}
    encoder = embedded_from_torch(gru_from_torch(named, "enc."), named, "enc.")
    decoder = predicting_from_torch(
        embedded_from_torch(gru_from_torch(named, "dec."), named, "dec."), named, "fc."
    )
    model = seq2seq_model(
        encoder,
        decoder,
        Decoding(go=_GO, end=_END, max_steps=lambda _: _MAX_PHONEMES),
        encoder_batch_sizes=batch_sizes,
        decoder_batch_sizes=batch_sizes,
    )

    def unfold(word: str) -> Graph:
        if not isinstance(word, str):
            raise InvalidGraphError(f"the input is a {type(word).__name__}; pass a word as a str")
        return model.unfold([*(_LETTER_IDS.get(letter, _UNKNOWN) for letter in word), _WORD_END])

    return G2P(CellModel(model.cells, unfold))


# Published name -> PyTorch's name.
_PUBLISHED = {
    **{
        f"{part}_{kind}_{gate}h": f"{part}.{name}_{gate}h"
        for part in ("enc", "dec")
        for kind, name in (("w", "weight"), ("b", "bias"))
        for gate in "ih"
    },
    **{"enc_emb": "enc.weight", "dec_emb": "dec.weight", "fc_w": "fc.weight", "fc_b": "fc.bias"},
}
