"""What speculation gains, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.speculation import KINDS, main, most_by_lookup, prompts_of
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_both_ways_give_the_same_answers(capsys, tmp_path):
    more = ["--repeats", "1", "--kinds", "summarising", "--requests", "1,3", "--max-context", "256"]
    assert main([*arguments(tmp_path), *more, "--output-tokens", "30"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [case["num_requests"] for case in result["cases"]] == [1, 3]
    for case in result["cases"]:
        assert case["num_same_answers"] == case["num_requests"]
        rates = [case[way]["tokens_per_s"] for way in ("lookup", "without")]
        assert case["is_faster_by"]["lookup"]["median"] == rates[0] / rates[1]
        assert case["without"]["num_draft_tokens"] == 0
        assert 1.0 <= case["most_by_lookup"] <= 8.0


def test_what_an_answer_quotes_bounds_what_a_lookup_gains():
    text = list(range(100, 117))
    assert most_by_lookup(text, list(range(16))) == 1.0
    # Two tokens until the text is found, and then eight with each iteration.
    assert most_by_lookup(text, text[:10]) == 10 / 3
    assert most_by_lookup([], []) == 0.0


def test_an_unknown_kind_is_refused(capsys, tmp_path):
    assert main([*arguments(tmp_path), "--kinds", "chat,poems"]) == 2
    assert "poems" in capsys.readouterr().err


def test_prompts_depend_on_the_seed_and_contain_what_is_to_be_quoted():
    texts = ["one two three", "four five"]
    for kind in KINDS:
        first, again = prompts_of(kind, texts, 1), prompts_of(kind, texts, 1)
        assert first == again
    for kind, word in (("repeating", "Repeat"), ("summarising", "Summarise")):
        asked = [prompt[0]["content"] for prompt in prompts_of(kind, texts, 1)]
        assert all(word in p and text in p for text, p in zip(texts, asked, strict=True))
    programs = [prompt[0]["content"] for prompt in prompts_of("editing", texts, 1)]
    assert programs != [prompt[0]["content"] for prompt in prompts_of("editing", texts, 2)]
    for program in programs:
        code = program.partition("```python\n")[2].removesuffix("```")
        compile(code, "program", "exec")
