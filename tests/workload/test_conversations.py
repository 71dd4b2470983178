"""Conversations in which every turn follows the previous answer."""

from __future__ import annotations

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.scheduling.presets import get_policy
from jaxserve.workload import sharegpt
from jaxserve.workload.conversations import Talk, Talks, UserTurn, sample
from tests.workload.made_up import WordTokenizer, record_of, written


def _write(path, lengths: list[list[tuple[int, int]]]):
    """Write records whose rounds have this many words of question and answer."""
    records = [
        record_of(
            f"talk{number}",
            (
                (who, " ".join([who] * count))
                for asked, said in rounds
                for who, count in (("human", asked), ("gpt", said))
            ),
        )
        for number, rounds in enumerate(lengths)
    ]
    return written(path, records)


def test_drawn_from_sharegpt(tmp_path):
    """Turns are in order; short and overlong conversations are skipped; lengths are scaled."""
    path = _write(tmp_path / "sharegpt.json", [[(4, 8)], [(3, 6), (5, 1)], [(90, 9), (1, 1)]])
    settings = {"tokenizer": WordTokenizer(), "path": path, "progress": False}
    (talk,) = sample(1, 0, max_context=50, min_rounds=2, **settings)
    assert [(len(t.token_ids), t.num_output_tokens) for t in talk.turns] == [(3, 6), (5, 1)]
    assert all(turn.reaction_s > 0 for turn in talk.turns) and talk.arrival_s == 0
    (half,) = sample(1, 0, max_context=50, min_rounds=2, scale=0.5, **settings)
    assert [(len(t.token_ids), t.num_output_tokens) for t in half.turns] == [(2, 3), (3, 1)]
    slow, fast = (sample(2, 3, max_context=50, rate=rate, **settings) for rate in (1.0, 4.0))
    assert slow[1].arrival_s == pytest.approx(4 * fast[1].arrival_s) and slow[1].arrival_s > 0
    assert [talk.turns for talk in slow] == [talk.turns for talk in fast]
    with pytest.raises(InvalidConfigError, match="more than the 2 conversations of 1 or more"):
        sample(3, 0, max_context=50, **settings)
    with pytest.raises(InvalidConfigError, match="scale=0"):
        sample(1, 0, max_context=50, scale=0, **settings)


def test_records_of_one_conversation_are_put_together(tmp_path):
    """They are cut after an answer, which the next record may repeat; others stay separate."""
    records = [
        ("a_0", "q1 a1 q2 a2"),
        ("a_3", "a2 q3 a3"),
        ("a_6", "q4 a4"),
        ("b_0", "q1 a1"),
        ("c", "q1 a1"),
    ]
    turns = {
        id: [("human" if word[0] == "q" else "gpt", word) for word in words.split()]
        for id, words in records
    }
    path = written(tmp_path / "sharegpt.json", [record_of(*each) for each in turns.items()])
    whole = list(sharegpt.whole(sharegpt.read(path)))
    texts = [" ".join(text for _, text in talk.messages) for talk in whole]
    assert texts == ["q1 a1 q2 a2 q3 a3 q4 a4", "q1 a1", "q1 a1"]
    assert [talk.origin for talk in whole] == ["a", "b", "c"]
    settings = {"tokenizer": WordTokenizer(), "path": path, "progress": False}
    talks = sample(1, 0, max_context=50, min_rounds=4, whole=True, **settings)
    assert [len(talk.turns) for talk in talks] == [4]
    with pytest.raises(InvalidConfigError, match="more than the 0 conversations of 4 or more"):
        sample(1, 0, max_context=50, min_rounds=4, **settings)


def test_turns_follow_their_answers():
    """Each prompt is the whole history, a reaction time after the previous answer."""
    talks = [
        Talk(
            turns=tuple(
                UserTurn(
                    token_ids=(talk + 1,) * 5, num_output_tokens=4 + turn, reaction_s=0.5 + talk
                )
                for turn in range(3)
            ),
            arrival_s=0.2 * talk,
        )
        for talk in range(4)
    ]
    client = Talks(talks, max_tokens=20)
    config = EngineConfig(num_pages=40, max_slots=2)
    run = simulate(
        client.items,
        get_policy("vllm_like"),
        config,
        FlatCost(),
        follow_up=client.follow_up,
        progress=False,
    )
    assert len(run.completions) == 12
    by_talk = {
        talk: [c for c in run.completions if c.prompt_token_ids[0] == talk + 1] for talk in range(4)
    }
    for talk, answers in by_talk.items():
        assert [len(answer.token_ids) for answer in answers] == [4, 5, 6]
        for before, after in zip(answers, answers[1:], strict=False):
            history = before.prompt_token_ids + before.token_ids
            assert after.prompt_token_ids == history + (talk + 1,) * 5
            ended_s = before.timing.finished_s
            assert ended_s is not None
            assert after.timing.arrival_s == pytest.approx(ended_s + 0.5 + talk)
