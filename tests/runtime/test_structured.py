"""Answers that match a grammar, from the library."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    AnswerTooShortError,
    GrammarFailedError,
    GrammarTooComplexError,
    InvalidGrammarError,
    InvalidSamplingParamsError,
    MissingExtraError,
)
from jaxserve.scheduling.plan import StepPlan, TokenMasks
from jaxserve.sharding import StagePlan, make_groups
from jaxserve.testing import OPTIONS, letter_tokenizer, random_prompts, tiny_llama
from tests.common.schemas import DOUBLING, SYMBOLS, random_schema
from tests.common.tiers import some

PROMPTS = random_prompts(8, longest=20)
# Grammars of every notation, and what they match.
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-z]{3,9}-[0-9]{2}"}, r"[a-z]{3,9}-[0-9]{2}"),
    ({"choice": ["red", "green", 'say "x"']}, r'red|green|say "x"'),
    ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-f]{1,6}/'}, r"<[a-f]{1,6}>"),
    ({"grammar": 'root ::= "(" [0-9] [0-9] ")"'}, r"\([0-9]{2}\)"),
    ({"json_schema": {"type": "integer", "minimum": 10, "maximum": 99}}, r"[1-9][0-9]"),
    (
        {
            "json_schema": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z]{4}$"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        r'\{"name": "[a-z]{4}"\}',
    ),
]


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    """Yield a runtime in which a compilation after the warm-up is an error."""
    with Runtime(
        tiny_llama(), tokenizer=letter_tokenizer(), **{**OPTIONS, "strict": True, "warmup": True}
    ) as rt:
        yield rt


def _params(given: dict[str, Any], seed: int, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 60, **given, **others})


def test_answers_match_alone_and_in_a_batch(rt: Runtime):
    """Greedy and random answers match, beside others without a grammar, with equal tokens alone."""
    asked = [
        (prompt, _params(given, i, temperature=float(i % 2)), pattern)
        for given, pattern in GRAMMARS
        for i, prompt in enumerate(PROMPTS[:4])
    ]
    free = [(prompt, SamplingParams(max_tokens=40), ".*") for prompt in PROMPTS]
    mixed = [each for pair in zip(asked, free * 3, strict=True) for each in pair]
    answers = rt.generate([prompt for prompt, _, _ in mixed], [params for _, params, _ in mixed])
    for (_, params, pattern), answer in zip(mixed, answers, strict=True):
        assert answer.error is None
        if params.is_constrained:
            assert answer.finish_reason == "stop"
            assert re.fullmatch(pattern, answer.text), (pattern, answer.text)
    for (prompt, params, _), answer in list(zip(mixed, answers, strict=True))[::5]:
        assert rt.generate([prompt], params)[0].token_ids == answer.token_ids


@pytest.mark.release
def test_preempted_answers_are_the_same(rt: Runtime):
    """In a small pool sequences are preempted; no token changes."""
    params = [_params({"regex": "[a-z ]{40,50}"}, i) for i in range(len(PROMPTS))]
    wanted = [answer.token_ids for answer in rt.generate(PROMPTS, params)]
    options = {**OPTIONS, "kv_memory": 2048 * 21, "policy": "vllm_like"}
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **options) as small:
        answers = small.generate(PROMPTS, params)
        assert small.stats().num_preemptions > 0
    assert [answer.token_ids for answer in answers] == wanted


MESHES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "stages": (lambda: StagePlan.of([1, 1], micro_batches=2), {}),
    "groups": (lambda: make_groups(encode=1, decode=1), {"policy": "exegpt_waa_c"}),
}


@pytest.mark.release
@pytest.mark.parametrize("name", some(MESHES))
def test_several_devices_give_the_same_answers(rt: Runtime, name: str):
    """A model in stages, and prompts and answers on devices of their own, obey the grammar too."""
    make, options = MESHES[name]
    given = [{"regex": "[a-c]{2}: (true|false)"}, {"json_object": True, "max_tokens": 12}]
    asked = [_params(given[i % 2], i) for i in range(len(PROMPTS))]
    asked[0] = SamplingParams(max_tokens=12)
    wanted = [answer.token_ids for answer in rt.generate(PROMPTS, asked)]
    with Runtime(
        tiny_llama(), tokenizer=letter_tokenizer(), mesh=make(), **{**OPTIONS, **options}
    ) as several:
        assert [answer.token_ids for answer in several.generate(PROMPTS, asked)] == wanted


def test_masks_are_complete_when_they_are_sent():
    """The leader of several processes sends plans; a copy has the masks themselves."""
    words = np.arange(6, dtype=np.uint32).reshape(2, 3)
    with ThreadPoolExecutor(1) as pool:
        masks = TokenMasks.begin((4, 7), lambda: words, pool)
        copied = pickle.loads(pickle.dumps(StepPlan(index=0, masks=masks))).masks
    assert copied is not None and copied.rows == (4, 7)
    np.testing.assert_array_equal(copied.words(), words)


def test_end_tokens_come_where_the_grammar_allows_them():
    """A model with end tokens ends a repetition by one of them, never before its least."""
    ends = (95, 96)
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), eos_token_ids=ends, **OPTIONS) as rt:
        params = [_params({"regex": "(ab|cd){3,}"}, seed, max_tokens=90) for seed in range(16)]
        answers = rt.generate(PROMPTS * 2, params)
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(ended) > 8 and {answer.token_ids[-1] for answer in ended} == set(ends)
    assert all(re.fullmatch("(ab|cd){3,}", answer.text) for answer in ended)


def test_forced_tokens_take_no_step(rt: Runtime):
    """Most characters of the answer are forced, and come without a step of their own."""
    schema = {
        "type": "object",
        "properties": {"temperature_in_celsius": {"enum": ["warm", "cold"]}},
        "required": ["temperature_in_celsius"],
        "additionalProperties": False,
    }
    before = rt.stats()
    answer = rt.generate("hi", SamplingParams(json_schema=schema))
    after = rt.stats()
    assert json.loads(answer.text)["temperature_in_celsius"] in ("warm", "cold")
    assert after.num_constrained == before.num_constrained + 1
    num_forced = after.num_forced - before.num_forced
    assert num_forced > 30
    assert after.num_steps - before.num_steps <= len(answer.token_ids) - num_forced + 2
    assert after.mask_s > before.mask_s


def test_an_answer_of_forced_tokens_alone_needs_no_step(rt: Runtime):
    """One choice is the answer, at once, for a stream too."""
    before = rt.stats().num_steps
    answer = rt.generate("hi", SamplingParams(choice=["abc"]))
    assert answer.text == "abc" and answer.timing.first_token_s is not None
    assert "".join(piece.text for piece in rt.stream("hi", SamplingParams(choice=["abc"]))) == "abc"
    assert rt.stats().num_steps == before


def test_logprobs_are_of_every_token(rt: Runtime):
    """With log-probabilities the model computes every token, also those that are forced."""
    params = SamplingParams(regex="ab[cd]e", logprobs=1)
    answer = rt.generate("hi", params)
    assert answer.text in ("abce", "abde")
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 4
    assert [each.token_id for each in answer.logprobs] == list(answer.token_ids)
    free = rt.generate("hi", SamplingParams(regex="ab[cd]e"))
    assert free.token_ids == answer.token_ids


def test_samples_streams_stops_and_limits(rt: Runtime):
    """A grammar holds for each of n samples, and with stop strings and length limits."""
    several = rt.generate("hi", _params({"regex": "[a-z]{6}", "n": 3}, 1))
    texts = [sample.text for sample in several.samples]
    assert len(set(texts)) > 1 and all(re.fullmatch("[a-z]{6}", text) for text in texts)
    params = _params({"regex": "[a-z]{6}"}, 2)
    assert (
        "".join(piece.text for piece in rt.stream("hi", params)) == rt.generate("hi", params).text
    )
    cut = rt.generate("hi", SamplingParams(regex="abc<>def", stop="<>"))
    assert (cut.text, cut.finish_reason) == ("abc", "stop")
    short = rt.generate("hi", SamplingParams(regex="[a-z]{20}", max_tokens=5))
    assert (len(short.token_ids), short.finish_reason) == (5, "length")
    forced = rt.generate("hi", SamplingParams(regex="a{20}", max_tokens=5))
    assert (forced.text, forced.finish_reason) == ("aaaaa", "length")
    whole = rt.generate("hi", SamplingParams(regex="[ab]{5}", max_tokens=5))
    assert (len(whole.text), whole.finish_reason) == (5, "stop")


@pytest.mark.parametrize("logprobs", [None, 0])
def test_answers_have_a_least_length(rt: Runtime, logprobs: int | None):
    """The end is forbidden until then, where the grammar allows another token; so is a stop."""
    stop = letter_tokenizer().encode("c", False)
    common: dict[str, Any] = {"stop_token_ids": stop, "min_tokens": 9, "logprobs": logprobs}
    asked = [_params({"regex": "[a-c]{2,30}"}, i, **common) for i in range(len(PROMPTS))]
    for answer in rt.generate(PROMPTS, asked):
        assert answer.error is None and answer.finish_reason == "stop"
        assert re.fullmatch("[ab]{9,30}", answer.text)


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "[ab]{4}"},
        {"choice": ["a", "bcde"]},
        {"regex": "aaaac[a-d]{9}", "stop_token_ids": letter_tokenizer().encode("c", False)},
    ],
)
@pytest.mark.parametrize("logprobs", [None, 0])
def test_grammars_of_shorter_answers(rt: Runtime, given: dict[str, Any], logprobs: int | None):
    """Where only an end may follow too early, that request fails, and others go on."""
    asked = [_params(given, 1, min_tokens=6, logprobs=logprobs), _params({"regex": "[ab]{4}"}, 1)]
    failed, other = rt.generate(PROMPTS[:2], asked)
    assert isinstance(failed.error, AnswerTooShortError)
    assert "must end after" in str(failed.error) and "min_tokens=6" in str(failed.error)
    assert other.error is None and len(other.text) == 4


def test_conversations_keep_the_grammar_of_a_turn(rt: Runtime):
    chat = rt.conversation()
    first = chat.send("hi", SamplingParams(regex="[ab]{4}"))
    second = chat.send("hi", SamplingParams(max_tokens=6))
    assert re.fullmatch("[ab]{4}", first.text) and len(second.token_ids) == 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "a", "choice": ["b"]}, "pass one of"),
        ({"choice": []}, "choice="),
        ({"choice": "abc"}, "choice="),
        ({"regex": ""}, "regex="),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[" * 9999 + "]" * 9999}, "not JSON"),
        ({"json_schema": [1]}, "not a schema"),
        ({"regex": "a" * 300_000}, "300000 characters"),
        ({"json_object": "yes"}, "json_object="),
    ],
)
def test_parameters_that_contradict(given: dict[str, Any], said: str):
    """What cannot be a constraint is refused where the parameters are made."""
    with pytest.raises(InvalidSamplingParamsError, match=re.escape(said)):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "start: nowhere"},
        {"json_schema": {"type": "object", "if": {}, "then": {}}},
        {"json_schema": {"type": "string", "format": "poem"}},
        {"json_schema": {"type": "thing"}},
        {"json_schema": {"$ref": "https://example.com/schema.json"}},
        {"json_schema": False},
    ],
)
def test_grammars_that_do_not_compile(rt: Runtime, given: dict[str, Any]):
    """A grammar with a mistake, or with a keyword that is not supported, fails alone."""
    with pytest.raises(InvalidGrammarError):
        rt.generate("hi", SamplingParams(**given))
    good, bad = rt.generate(["hi", "hi"], [SamplingParams(regex="[ab]"), SamplingParams(**given)])
    assert good.text in "ab" and isinstance(bad.error, InvalidGrammarError)


@pytest.mark.parametrize(
    "given",
    some(
        [
            {"regex": "((a{1,900}b{1,900}){1,900}c{1,900}){1,900}"},
            {"regex": "(.*a.{60}b.*|.*b.{70}a.*)&(.*c.{80}d.*)" + "|(x|y)*x(x|y){400}"},
            {"grammar": DOUBLING},
            {"grammar": SYMBOLS},
            {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
        ],
        0,
        1,
    ),
    ids=["repeats", "states", "doubling", "symbols", "items"],
)
def test_grammars_that_explode(rt: Runtime, given: dict[str, Any]):
    """Time and memory are bounded, and a neighbour gets its answer meanwhile."""
    others: list[str] = []
    neighbour = threading.Thread(
        target=lambda: others.append(rt.generate("hi", SamplingParams(regex="[ab]{9}")).text)
    )
    begin_s = time.monotonic()
    neighbour.start()
    (answer,) = rt.generate(["hi"], SamplingParams(max_tokens=20, **given))
    assert time.monotonic() - begin_s < 30
    neighbour.join(30)
    assert answer.error is None or isinstance(answer.error, GrammarTooComplexError)
    assert (answer.error is not None) == ("grammar" in given)
    assert re.fullmatch("[ab]{9}", others[0])


# Answers of each schema.
_NUM_SEEDS = 6


@pytest.mark.parametrize("num_schemas", some([40, 200]))
def test_schemas_hold(num_schemas: int):
    """Of random schemas, every answer that ends validates, and nearly all end."""
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    params = [
        _params({"json_schema": schema}, seed, max_tokens=120)
        for schema in schemas
        for seed in range(_NUM_SEEDS)
    ]
    options = {**OPTIONS, "max_slots": 32, "max_step_tokens": 32}
    with Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **options) as rt:
        answers = rt.generate(["x"] * len(params), params)
    num_ended = 0
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for i, schema in enumerate(schemas):
        checked = jsonschema.Draft202012Validator(schema, format_checker=checker)
        its_own = answers[i * _NUM_SEEDS : (i + 1) * _NUM_SEEDS]
        for answer in its_own:
            assert answer.error is None, (schema, answer.error)
        ended = [answer.text for answer in its_own if answer.finish_reason == "stop"]
        for text in set(ended):
            checked.validate(json.loads(text))
        num_ended += len(ended)
    assert num_ended > 0.85 * len(answers), f"seed 0: only {num_ended} ended"


def test_answers_that_do_not_validate(rt: Runtime):
    """A finished answer fails alone where jsonschema does not agree; one that is cut passes.

    Nothing is an instance of this schema, whose grammar has an answer all the same.
    """
    one = {"type": "array", "prefixItems": [{"const": 2**53 + 1}], "items": False, "minItems": 2}
    params = [
        SamplingParams(json_schema=one),
        SamplingParams(json_schema={"enum": ["ab"]}),
        SamplingParams(json_schema=one, max_tokens=3),
    ]
    bad, good, cut = rt.generate(["hi"] * 3, params)
    assert isinstance(bad.error, GrammarFailedError) and "is too short" in str(bad.error)
    assert (good.error, good.finish_reason, good.text) == (None, "stop", '"ab"')
    assert (cut.error, cut.finish_reason) == (None, "length")


def test_a_missing_package_is_named(rt: Runtime, monkeypatch: pytest.MonkeyPatch):
    """Without llguidance a request with a grammar fails alone, and its error says what to do."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    params = [SamplingParams(regex="[xyz]"), SamplingParams(max_tokens=3)]
    bad, good = rt.generate(["hi", "hi"], params)
    assert isinstance(bad.error, MissingExtraError) and ".[structured]" in str(bad.error)
    assert len(good.token_ids) == 3


def test_a_runtime_without_a_tokenizer_refuses_grammars():
    """Without a tokenizer it is unknown which tokens a grammar allows."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        with pytest.raises(InvalidSamplingParamsError, match="tokenizer"):
            rt.generate([1, 2], SamplingParams(regex="a"))
