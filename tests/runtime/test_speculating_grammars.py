"""Answers with a grammar speculate too, and keep every token."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.engine.grammars import Grammars
from jaxserve.engine.lookup import HostLookup
from jaxserve.engine.matcher import Matcher
from jaxserve.sharding import StagePlan
from jaxserve.testing import OPTIONS, letter_tokenizer, tiny_llama
from tests.common.tiers import some

# What the answers are of, and text that their prompts repeat.
GRAMMARS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "[a-d]{50}"}, "[a-d]{50}", "abcd"),
    ({"regex": "([ab][cd]-){12}[ab]"}, "([ab][cd]-){12}[ab]", "ac-bd-"),
    ({"regex": r'(\{"key": [0-9]\}){4}'}, r'(\{"key": [0-9]\}){4}', '{"key": 1}'),
    ({"choice": ["red", "green"]}, "red|green", "red"),
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Runtime]:
    options: dict[str, Any] = OPTIONS | {"deterministic": True}
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **options) as runtime:
        yield runtime


@pytest.fixture(scope="module", params=some(["whole", "stages"]))
def speculating(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options: dict[str, Any] = {
        **OPTIONS,
        "policy": "vllm_like",
        "kv_memory": "32KiB",
        "deterministic": True,
        "strict": True,
        "warmup": True,
        "speculation": "lookup",
    }
    if request.param == "stages":  # each of which has half of the layers
        options |= {"mesh": StagePlan.of([1, 1], micro_batches=2), "kv_memory": "16KiB"}
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **options) as runtime:
        yield runtime


@pytest.mark.release
def test_tokens_are_those_without_speculation(plain: Runtime, speculating: Runtime):
    """Greedy and drawn, with penalties and log-probabilities, alone and beside free answers.

    Log-probabilities are the same to the bit.

    The runtime that speculates has pages for few of them, so that some are preempted.
    """
    tokenizer = letter_tokenizer()
    bias = dict.fromkeys(tokenizer.encode("ab1"), 30.0)
    for seed in range(3):
        rng = random.Random(seed)
        asked: list[tuple[str, SamplingParams, str]] = []
        for grammar, pattern, text in GRAMMARS:
            kinds: list[dict[str, Any]] = [
                {},
                {"temperature": 0.7},
                {"temperature": 1.0, "logit_bias": bias, "logprobs": 1},
                {"frequency_penalty": 0.3, "max_tokens": rng.randint(5, 40)},
            ]
            for kind in rng.sample(kinds, 2):
                options = {"max_tokens": 80, "seed": seed, **kind, **grammar}
                asked.append((text * rng.randint(2, 4), SamplingParams(**options), pattern))
        asked.append(("abc" * 5, SamplingParams(max_tokens=40), ".*"))
        if not seed:  # one answer, which repeats itself under its grammar
            grammar, pattern, text = GRAMMARS[0]
            params = SamplingParams(max_tokens=50, logit_bias=bias, **grammar)
            asked = [(text * 3, params, pattern)]
        wanted, given = (
            rt.generate([each[0] for each in asked], [each[1] for each in asked])
            for rt in (plain, speculating)
        )
        for (_, params, pattern), one, other in zip(asked, wanted, given, strict=True):
            assert other.token_ids == one.token_ids
            assert other.finish_reason == one.finish_reason
            if params.is_constrained and other.finish_reason == "stop":
                assert re.fullmatch(pattern, other.text)
            assert other.logprobs == one.logprobs
        if not seed:
            assert speculating.stats().num_accepted_tokens > 20
    stats = speculating.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0
    assert plain.stats().num_draft_tokens == 0


@pytest.mark.release
def test_answers_with_and_without_proposals_share_a_step():
    """Eight slots, answers that repeat their prompts and others that do not, bit by bit."""
    tokenizer = letter_tokenizer()
    bias = dict.fromkeys(tokenizer.encode("ab1"), 30.0)
    rng = random.Random(0)
    prompts, params = list[str](), list[SamplingParams]()
    for i in range(12):
        grammar, _, text = GRAMMARS[i % 3]
        quotes = i % 2 == 0
        prompts.append(text * rng.randint(2, 5) if quotes else "xyz")
        kind = {"logit_bias": bias} if quotes else {"temperature": 1.0}
        params.append(SamplingParams(max_tokens=50, seed=i, logprobs=1, **kind, **grammar))
    options: dict[str, Any] = OPTIONS | {"max_slots": 8, "deterministic": True}
    with Runtime(tiny_llama(), tokenizer=tokenizer, **options) as runtime:
        wanted = runtime.generate(prompts, params)
    with Runtime(tiny_llama(), tokenizer=tokenizer, **options, speculation="lookup") as runtime:
        given = runtime.generate(prompts, params)
        assert runtime.stats().num_accepted_tokens > 20
    for one, other in zip(wanted, given, strict=True):
        assert one.error is None and other.error is None
        assert (other.token_ids, other.logprobs) == (one.token_ids, one.logprobs)


def test_a_grammar_cuts_what_is_proposed():
    """Not beyond what is forbidden or completes the answer; with all of what is forced, or none."""
    tokenizer = letter_tokenizer()
    grammars = Grammars(tokenizer, (), tokenizer.vocab_size)

    def proposed(regex: str, before: str, text: str, most: int = 20, forces: bool = True) -> str:
        constraint = SamplingParams(regex=regex).constraint
        assert constraint is not None
        matcher = Matcher(grammars.compiled(constraint).template.deep_copy())
        matcher.follow(tokenizer.encode(before))
        found = matcher.propose(tokenizer.encode(text), most, forces=forces)
        matcher.follow(tokenizer.encode(before + "a"))  # it stands where it stood
        assert matcher.error is None
        return tokenizer.decode(list(found))

    try:
        assert proposed("[a-c]+", "a", "abxc") == "ab"
        assert proposed("[a-c]{4}", "a", "bca") == "bc"
        assert proposed("[a-c]+", "a", "abcabc", most=3) == "abc"
        assert proposed("[a-c]{2}--[a-c]{9}", "a", "b--ac") == "b--ac"
        assert proposed("[a-c]{2}--[a-c]{9}", "a", "bac") == "b--"
        assert proposed("[a-c]{2}--[a-c]{9}", "a", "b--ac", most=2) == ""
        assert proposed("[a-c]{2}--[a-c]{9}", "a", "b--ac", most=2, forces=False) == "b-"
    finally:
        grammars.close()


def test_the_host_finds_what_followed_the_newest_tokens():
    lookup = HostLookup([1, 2, 3, 4, 1, 2])
    assert lookup.propose(3) == [3, 4, 1]
    assert lookup.propose(6) == [3, 4, 1, 2, 3, 4]
    lookup.follow([9])
    assert lookup.propose(3) == []
    lookup.follow([])
    for _ in range(30):  # what is wrong all the time is proposed no more
        lookup.propose(3)
        lookup.learn([9], 1, 3)
    assert lookup.propose(3) == []


def test_a_long_prompt_is_looked_up_in_after_some_steps():
    """Its places become known a part at a time, so that no step waits for all of them."""
    prompt = [*range(10, 3000), 1, 2, 7, 8, 9]
    at_once = HostLookup(prompt)
    at_once.follow([1, 2])
    assert at_once.propose(2) == []
    later, output = HostLookup(prompt), []
    for token in range(5000, 5008):
        output.append(token)
        later.follow(output)
    later.follow([*output, 1, 2])
    assert later.propose(2) == [7, 8]
