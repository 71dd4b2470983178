"""Beam search on the device finds the hypotheses of a plain search in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jaxserve.cells import CellRuntime
from jaxserve.cells.models import CellModel, Decoding, beam_search_model, seq2seq_model
from jaxserve.cells.models.torch_weights import (
    embedded_from_torch,
    lstm_from_torch,
    predicting_from_torch,
)
from jaxserve.core.errors import InvalidConfigError
from tests.common.tiers import some

VOCAB, EMBED, HIDDEN = 13, 5, 6
GO, END = 0, 4


class _Translator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, EMBED)
        self.encoder, self.decoder = (torch.nn.LSTM(EMBED, HIDDEN) for _ in range(2))
        self.project = torch.nn.Linear(HIDDEN, VOCAB)
        with torch.no_grad():
            self.project.weight *= 8
            self.project.bias[END] += 3.5

    def search(
        self, tokens: list[int], num_beams: int, max_steps: int, end: int | None, exponent: float
    ) -> list[tuple[float, list[int]]]:
        """Return the scores and tokens of the hypotheses, best first."""
        _, state = self.encoder(self.embedding(torch.tensor(tokens)))
        beams = [(0.0, 0.0, [], state)]
        for _ in range(max_steps):
            found = []
            for score, total, answer, state in beams:
                if answer and answer[-1] == end:
                    found.append((score, total, answer, state))
                    continue
                last = torch.tensor([answer[-1] if answer else GO])
                h, new_state = self.decoder(self.embedding(last), state)
                gains = self.project(h[-1]).log_softmax(-1)
                penalty = ((6 + len(answer)) / 6) ** exponent
                for token, gain in enumerate(gains.tolist()):
                    new = total + gain
                    found.append((new / penalty, new, [*answer, token], new_state))
            beams = sorted(found, key=lambda one: -one[0])[:num_beams]
            if all(answer[-1] == end for _, _, answer, _ in beams):
                break
        return [(score, answer) for score, _, answer, _ in beams]


@pytest.fixture(scope="module")
def translator() -> _Translator:
    torch.manual_seed(0)
    return _Translator().requires_grad_(False)


def _model(translator: _Translator, **options) -> CellModel:
    tensors = {name: value.detach().numpy() for name, value in translator.state_dict().items()}
    encoder, decoder = (
        embedded_from_torch(lstm_from_torch(tensors, f"{part}."), tensors, "embedding.")
        for part in ("encoder", "decoder")
    )
    end = options.pop("end", END)
    decoding = Decoding(go=GO, end=end, max_steps=lambda num: num + 5)
    predicting = predicting_from_torch(decoder, tensors, "project.")
    if not options:
        return seq2seq_model(encoder, predicting, decoding)
    sizes = {"encoder_batch_sizes": (1, 4), "decoder_batch_sizes": (1, 4)}
    return beam_search_model(encoder, predicting, decoding, **sizes, **options)


def _sentences(num: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, random.integers(1, 6)).tolist() for _ in range(num)]


@pytest.mark.parametrize(
    ("num_beams", "exponent", "end", "reasons"),
    some(
        [
            (3, 0.0, END, {"stop", "length"}),
            (4, 1.0, END, {"stop", "length"}),
            (4, 0.6, None, {"stop"}),
            (VOCAB, 1.5, GO, {"length"}),
        ]
    ),
)
def test_it_finds_the_hypotheses_of_a_plain_search(translator, num_beams, exponent, end, reasons):
    """All hypotheses and their scores are the same, also when requests are batched."""
    sentences = _sentences(12)
    model = _model(translator, num_beams=num_beams, length_penalty=exponent, end=end)
    with CellRuntime(model.cells, model.unfold, warmup=False, progress=False) as rt:
        answers = rt.generate(sentences)
    for tokens, found in zip(sentences, answers, strict=True):
        expected = translator.search(tokens, num_beams, len(tokens) + 5, end, exponent)
        scores, hypotheses = zip(*expected, strict=True)
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-4)
        assert found["score"] == found["scores"][0]
        assert found["token"].tolist() == hypotheses[0]
        num_steps = max(map(len, hypotheses))
        assert found["tokens"].tolist() == [
            [*one, *[end] * (num_steps - len(one))] for one in hypotheses
        ]
        has_ended = end is None or all(one[-1] == end for one in hypotheses)
        assert found.finish_reason == ("stop" if has_ended else "length")
    assert {found.finish_reason for found in answers} == reasons


@pytest.mark.release
def test_one_beam_is_the_likeliest_tokens(translator):
    """A search with one beam gives the tokens of the decoder that takes the likeliest."""
    sentences = _sentences(12)
    answers = []
    for model in (_model(translator, num_beams=1), _model(translator)):
        with CellRuntime(model.cells, model.unfold, warmup=False, progress=False) as rt:
            answers.append([found["token"].tolist() for found in rt.generate(sentences)])
    assert answers[0] == answers[1]


@pytest.mark.release
def test_more_beams_find_likelier_answers(translator):
    """As many beams as tokens find answers at least as likely in nearly all cases."""
    found = []
    for num_beams in (1, VOCAB):
        model = _model(translator, num_beams=num_beams)
        with CellRuntime(model.cells, model.unfold, warmup=False, progress=False) as rt:
            found.append([float(one["score"]) for one in rt.generate(_sentences(12))])
    assert np.mean(np.array(found[1]) >= np.array(found[0]) - 1e-4) > 0.8


def test_a_number_of_beams_is_checked(translator):
    """There are at most as many beams as tokens."""
    for num_beams in (0, VOCAB + 1):
        with pytest.raises(InvalidConfigError, match="pass 1 to 13"):
            _model(translator, num_beams=num_beams)
