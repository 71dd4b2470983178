"""`/v1/completions`, `/tokenize`, `/detokenize` and tokens in and out."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.testing import letter_tokenizer
from tests.server.serving import CHAT, NAME, events, post


def _complete(ai: openai.OpenAI, prompt: Any, **others: Any) -> Any:
    return ai.completions.create(model=NAME, prompt=prompt, temperature=0, **others)


def test_completion_is_the_runtimes(rt: Runtime, ai: openai.OpenAI):
    """A text prompt is not rendered as a chat, and 16 tokens are the default."""
    expected = rt.generate("abc", SamplingParams(max_tokens=16))
    answer = _complete(ai, "abc")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    pieces = list(_complete(ai, "abc", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in pieces if c.choices) == expected.text
    assert pieces[-1].usage.completion_tokens == 16


@pytest.mark.parametrize(
    "prompts", [["abc", "xy"], [[3, 4, 5], [6]], [[3, 4, 5]]], ids=["texts", "tokens", "one"]
)
def test_several_prompts_and_samples(rt: Runtime, ai: openai.OpenAI, prompts):
    """Sample i of prompt p has the index p * n + i, streamed or not."""
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=5)
    expected = [sample.text for one in rt.generate(prompts, params) for sample in one.samples]
    asked: Any = {"model": NAME, "prompt": prompts, "max_tokens": 6, "n": 2, "seed": 5}
    choices = ai.completions.create(**asked).choices
    assert [choice.index for choice in choices] == list(range(len(expected)))
    assert [choice.text for choice in choices] == expected
    texts = [""] * len(expected)
    for chunk in ai.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_echo_puts_the_prompt_first(rt: Runtime, ai: openai.OpenAI):
    """With echo the text begins with the prompt, whose tokens have log-probabilities too."""
    expected = rt.generate("abc", SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1))
    choice = _complete(ai, "abc", max_tokens=4, echo=True, logprobs=1).choices[0]
    assert choice.text == "abc" + expected.text
    assert expected.prompt_logprobs is not None and expected.logprobs is not None
    scores = [*expected.prompt_logprobs, *expected.logprobs]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [score.logprob for score in scores if score is not None]
    )
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == list(range(7))
    pieces = _complete(ai, "abc", max_tokens=4, echo=True, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_a_prompt_alone(url: str):
    """`max_tokens=0` with echo gives the prompt and its log-probabilities, as in vLLM 0.32."""
    asked = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    longer = post(url, "/v1/completions", asked).json()["choices"][0]["logprobs"]
    answer = post(url, "/v1/completions", {**asked, "max_tokens": 0}).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"] == {name: each[:3] for name, each in longer.items()}
    assert answer["usage"]["completion_tokens"] == 0
    for others in ({"echo": False}, {"stream": True, "logprobs": None}):
        refused = post(url, "/v1/completions", {**asked, "max_tokens": 0, **others})
        assert refused.status_code == 400 and "max_tokens=0 needs echo" in refused.text


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_of_prompts_and_choices(url: str, echo: bool):
    """`return_token_ids` gives the ids of both, streamed once for each choice, and echoed too."""
    asked = {"prompt": ["abc", "xy"], "max_tokens": 6, "n": 2, "seed": 5, "echo": echo}
    body = {**asked, "return_token_ids": True}
    choices = post(url, "/v1/completions", body).json()["choices"]
    tokenizer = letter_tokenizer()
    prompts = [tokenizer.encode(each) for each in ("abc", "abc", "xy", "xy")]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    chunks = events(post(url, "/v1/completions", {**body, "stream": True}).text)
    for choice in choices:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        shown = [c["prompt_token_ids"] for c in mine if "prompt_token_ids" in c]
        assert shown == [choice["prompt_token_ids"]]
        assert [i for c in mine for i in c.get("token_ids", ())] == choice["token_ids"]
        assert "".join(c["text"] for c in mine) == choice["text"]


def test_streamed_logprobs(ai: openai.OpenAI):
    whole = _complete(ai, "abc", max_tokens=9, logprobs=2).choices[0].logprobs
    parts = [
        chunk.choices[0].logprobs
        for chunk in _complete(ai, "abc", max_tokens=9, logprobs=2, stream=True)
    ]
    assert [one for part in parts if part for one in part.token_logprobs] == whole.token_logprobs
    assert [one for part in parts if part for one in part.text_offset] == whole.text_offset


def test_tokens_in_and_out_agree_with_the_runtime(rt: Runtime, url: str):
    """Rollouts get the exact tokens and log-probabilities of `generate`, streamed or not."""
    params = SamplingParams(
        max_tokens=8, n=2, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0
    )
    expected = rt.generate([5, 6, 7], params)
    asked = {"max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1}
    body = {"token_ids": [5, 6, 7], "sampling_params": {**asked, "prompt_logprobs": 0}}
    answer = post(url, "/inference/v1/generate", body).json()
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 3
    chunks = events(
        post(
            url,
            "/inference/v1/generate",
            {"token_ids": [5, 6, 7], "sampling_params": asked, "stream": True},
        ).text
    )
    assert chunks[-1]["usage"] == answer["usage"]
    for i, sample in enumerate(expected.samples):
        choice = answer["choices"][i]
        assert sample.logprobs is not None
        assert choice["token_ids"] == list(sample.token_ids)
        assert choice["logprobs"] == pytest.approx([one.logprob for one in sample.logprobs])
        assert [top[0]["token_id"] for top in choice["top_logprobs"]] == [
            one.top[0][0] for one in sample.logprobs
        ]
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"]
        assert [score for c in mine for score in c["logprobs"]] == choice["logprobs"]


def test_tokenize_and_back(url: str):
    """`/tokenize` gives the ids of a text or a chat, and `/detokenize` the text of ids."""
    tokenizer = letter_tokenizer()
    found = post(url, "/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode("abc")
    assert (found["count"], found["max_model_len"]) == (3, 128)
    assert found["token_strs"] == ["a", "b", "c"]
    assert post(url, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "abc"}
    chat = post(url, "/tokenize", {"messages": CHAT}).json()["tokens"]
    assert chat == tokenizer.apply_chat_template(CHAT)
    tool = {"type": "function", "function": {"name": "f"}}
    for bad in (
        {},
        {"prompt": "a", "messages": CHAT},
        {"messages": CHAT, "add_special_tokens": 1},
        {"prompt": "a", "tools": [tool]},
    ):
        assert post(url, "/tokenize", bad).status_code == 400
    assert post(url, "/detokenize", {"tokens": [97]}).status_code == 400


def test_texts_of_tokens_have_a_limit(url: str):
    """`/tokenize` counts the tokens of any text, and has the texts of 131,072 of them at most."""
    long: dict[str, Any] = {"prompt": "a" * (131_072 + 1)}
    refused = post(url, "/tokenize", {**long, "return_token_strs": True})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "return_token_strs"
    assert "return_token_strs allows 131072 tokens, and there are 131073" in error["message"]
    assert post(url, "/tokenize", long).json()["count"] == 131_073
    most = {"prompt": "a" * 131_072, "return_token_strs": True}
    assert len(post(url, "/tokenize", most).json()["token_strs"]) == 131_072


def test_models(ai: openai.OpenAI):
    assert [model.id for model in ai.models.list()] == [NAME]
    assert ai.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("other")


def test_the_runtime_knows_a_request_by_its_answer(rt: Runtime, url: str):
    """An answer's id is that of its request; that of a further prompt has its number behind it."""
    generated = post(url, "/inference/v1/generate", {"token_ids": [5, 6]}).json()["request_id"]
    completed = post(url, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}).json()["id"]
    found = [record.request_id for record in rt.report().requests]
    assert {generated, completed, f"{completed}-1"} <= set(found)
