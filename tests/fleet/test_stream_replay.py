"""Streams of answers that start several times: every token, character and end comes once."""

from __future__ import annotations

import random

import pytest

from jaxserve.core.errors import ReplicaDiedError
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.engine.answers import Piece, failed_completion
from jaxserve.fleet.dispatcher import StreamReplay
from tests.common.tiers import seeds

pytestmark = pytest.mark.fast

NUM_SAMPLES = 3


def _pieces(rng: random.Random, sample: int) -> list[Piece]:
    """Return a sample in pieces of random sizes; text follows its tokens, some with the end."""
    tokens, text = tuple(range(20 + sample)), "".join(chr(97 + i) for i in range(15 + sample))
    pieces = []
    while tokens:
        count, length = rng.randint(1, 6), rng.randint(0, 4)
        pieces.append(Piece(text=text[:length], token_ids=tokens[:count], sample_index=sample))
        tokens, text = tokens[count:], text[length:]
    return [*pieces, Piece(text=text, token_ids=(), sample_index=sample, finish_reason="stop")]


def _replay(rng: random.Random) -> list[Piece]:
    """Replay all samples, with their pieces in a random order."""
    queues = [_pieces(rng, sample) for sample in range(NUM_SAMPLES)]
    played = []
    while any(queues):
        played.append(rng.choice([queue for queue in queues if queue]).pop(0))
    return played


@seeds(300)
def test_whatever_was_shown_is_not_shown_again(seeds):
    """Replicas die anywhere; the last answer is whole, or a completion has the rest."""
    for seed in seeds:
        rng = random.Random(seed)
        seen: list[Piece] = []
        replay = StreamReplay(seen.append, NUM_SAMPLES)
        for _ in range(rng.randint(0, 3)):
            replay.begin()
            replayed = _replay(rng)
            for piece in replayed[: rng.randint(0, len(replayed))]:
                replay.show(piece)
            replay.show(Piece(text="", token_ids=(), finish_reason="error"))
        is_whole = rng.random() < 0.7
        if is_whole:
            replay.begin()
            for piece in _replay(rng):
                replay.show(piece)
        error = None if is_whole else ReplicaDiedError("again")
        replay.end(_completion(error))
        for sample in range(NUM_SAMPLES):
            own = [piece for piece in seen if piece.sample_index == sample]
            tokens = [token for piece in own for token in piece.token_ids]
            text = "".join(piece.text for piece in own)
            ends = [piece.finish_reason for piece in own if piece.finish_reason]
            assert tokens == list(range(len(tokens))), seed
            assert text == "".join(chr(97 + i) for i in range(len(text))), seed
            assert ends == ["stop"] or (ends == ["error"] and not is_whole), seed
            assert own[-1].finish_reason is not None, seed
            if ends == ["stop"]:
                assert (len(tokens), len(text)) == (20 + sample, 15 + sample), seed


def test_other_tokens_of_another_replica_are_reported_once(caplog):
    """It is reported if tokens that were already shown differ; equal tokens are not reported."""
    for second, num_reports in (((1, 2, 3, 4, 5), 0), ((1, 9, 9, 4, 5), 1)):
        caplog.clear()
        seen: list[Piece] = []
        replay = StreamReplay(seen.append, 1)
        replay.show(Piece(text="", token_ids=(1, 2, 3)))
        replay.begin()
        for token in second:
            replay.show(Piece(text="", token_ids=(token,)))
        assert [token for piece in seen for token in piece.token_ids] == [1, 2, 3, 4, 5]
        assert caplog.text.count("other tokens") == num_reports


def _completion(error: ReplicaDiedError | None) -> Completion:
    timing = Timing(arrival_s=0.0)
    if error is not None:
        return failed_completion("r", (), error, timing)
    sample = Sample(text="", token_ids=(), finish_reason="stop")
    return Completion(
        request_id="r", prompt_token_ids=(), samples=(sample,) * NUM_SAMPLES, timing=timing
    )
