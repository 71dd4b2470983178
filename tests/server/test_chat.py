"""`/v1/chat/completions` with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from jaxserve import Runtime, SamplingParams
from tests.server.serving import CHAT, NAME, events, post


def _greedy(ai: openai.OpenAI, **others: Any) -> Any:
    given = {"messages": CHAT, "max_completion_tokens": 12, "temperature": 0, **others}
    return ai.chat.completions.create(model=NAME, **given)


def test_answer_is_the_runtimes(rt: Runtime, ai: openai.OpenAI):
    """The text, the numbers of tokens and the reason of the end are those of `generate`."""
    expected = rt.generate(CHAT, SamplingParams(max_tokens=12))
    answer = _greedy(ai)
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 12 + len(expected.prompt_token_ids)


def test_streamed_answer_is_the_same(ai: openai.OpenAI):
    """The chunks, joined, are the answer; the last one with a choice says why it ended."""
    whole = _greedy(ai).choices[0].message.content
    chunks = list(_greedy(ai, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(ai: openai.OpenAI):
    """Without include_usage no chunk has usage or no choice."""
    assert all(chunk.choices and chunk.usage is None for chunk in _greedy(ai, stream=True))


def test_cached_tokens_are_told(rt: Runtime, url: str):
    """Whole pages before the last token of a prompt that came before, streamed or not."""
    said = [{"role": "user", "content": "what is cached"}]
    for path, asked, num_prompts in (
        ("/v1/chat/completions", {"messages": said}, 1),
        ("/v1/completions", {"prompt": ["is this cached", "and is this one"], "n": 2}, 2),
    ):
        body = {**asked, "max_tokens": 2, "seed": 1}
        first = post(url, path, body).json()["usage"]
        again = post(url, path, body).json()["usage"]
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        last = events(post(url, path, streamed).text)[-1]["usage"]
        size = rt.options.page_size
        cached = num_prompts * ((again["prompt_tokens"] // num_prompts - 1) // size) * size
        assert first["prompt_tokens_details"] == {"cached_tokens": 0}
        assert again["prompt_tokens_details"] == {"cached_tokens": cached} and cached
        assert last == again


def test_stop_string_ends_the_answer(ai: openai.OpenAI):
    whole = _greedy(ai).choices[0].message.content
    stop = whole[4:6]
    cut = whole[: whole.index(stop)]
    choice = _greedy(ai, stop=[stop, "not in it"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (cut, "stop")
    chunks = list(_greedy(ai, stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_samples_have_indices(ai: openai.OpenAI):
    """With n samples there are n choices; the stream's chunks say which sample they continue."""
    asked: Any = {"n": 3, "temperature": 1.0, "seed": 7}
    whole = [choice.message.content for choice in _greedy(ai, **asked).choices]
    assert len(set(whole)) == 3
    texts = ["", "", ""]
    for chunk in _greedy(ai, **asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole


def test_seed_repeats_an_answer(ai: openai.OpenAI):
    """Equal seeds give equal answers, and the default temperature is 1."""
    given: Any = {"messages": CHAT, "max_completion_tokens": 12}
    answers = [
        ai.chat.completions.create(model=NAME, seed=seed, **given).choices[0].message.content
        for seed in (3, 3, 4)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_logprobs_are_the_runtimes(rt: Runtime, ai: openai.OpenAI):
    """Each token comes with its log-probability and the likeliest ones, streamed or not."""
    asked = SamplingParams(max_tokens=12, logprobs=2)
    expected = rt.generate(CHAT, asked).samples[0].logprobs
    assert expected is not None
    content = _greedy(ai, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx([one.logprob for one in expected])
    assert [top.logprob for each in content for top in each.top_logprobs] == pytest.approx(
        [logprob for one in expected for _, logprob in one.top]
    )
    streamed = [
        each
        for chunk in _greedy(ai, logprobs=True, top_logprobs=2, stream=True)
        for each in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert streamed == content
    assert [each.token for each in content] == list(_greedy(ai).choices[0].message.content)


@pytest.mark.parametrize(
    ("asked", "params"),
    [
        ({"logit_bias": {"5": 100}}, {"logit_bias": {5: 100.0}}),
        ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"top_p": 0.5, "temperature": 1.5, "seed": 1}, {"top_p": 0.5, "temperature": 1.5}),
        ({"extra_body": {"top_k": 2}, "temperature": 1.5, "seed": 1}, {"top_k": 2}),
        ({"extra_body": {"min_p": 0.5}, "temperature": 1.5, "seed": 1}, {"min_p": 0.5}),
        ({"extra_body": {"repetition_penalty": 2}}, {"repetition_penalty": 2.0}),
        ({"extra_body": {"stop_token_ids": [38], "min_tokens": 5}}, {"min_tokens": 5}),
        ({"extra_body": {"ignore_eos": True, "skip_special_tokens": False}}, {}),
        ({"max_completion_tokens": openai.omit, "max_tokens": 3}, {"max_tokens": 3}),
        ({"user": "someone", "store": False, "modalities": ["text"]}, {}),
    ],
)
def test_sampling_fields_reach_the_runtime(rt: Runtime, ai: openai.OpenAI, asked, params):
    """Every sampling field has the effect that it has in `SamplingParams`."""
    extra = asked.get("extra_body", {})
    others = {"stop_token_ids": tuple(extra["stop_token_ids"])} if "stop_token_ids" in extra else {}
    shared = {name: asked[name] for name in ("temperature", "seed") if name in asked}
    expected = rt.generate(CHAT, SamplingParams(**{"max_tokens": 12, **shared, **others, **params}))
    choice = _greedy(ai, **asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)


def test_seeds_have_64_bits(rt: Runtime, ai: openai.OpenAI):
    """The sampler takes them modulo 2**32, so small negative ones have answers of their own."""

    def answer(seed: int) -> str | None:
        asked = _greedy(ai, temperature=1.5, seed=seed, top_p=1.0)
        return asked.choices[0].message.content

    for seed in (-1, -(2**63), 2**63 - 1, 2**32 + 5):
        params = SamplingParams(max_tokens=12, temperature=1.5, seed=seed % 2**32)
        assert answer(seed) == rt.generate(CHAT, params).text
    assert answer(-1) != answer(1)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tier_is_the_only_one(url: str, stream: bool):
    """An answer names its tier where the request does, as at OpenAI."""
    body = {"messages": CHAT, "max_tokens": 2, "stream": stream}
    for given, told in (("auto", "default"), ("default", "default"), (None, None)):
        answer = post(url, "/v1/chat/completions", {**body, "service_tier": given})
        parts = events(answer.text) if stream else [answer.json()]
        assert [part.get("service_tier") for part in parts] == [told] * len(parts)


def test_token_ids_are_returned_when_asked_for(rt: Runtime, url: str):
    """`return_token_ids` adds the ids of prompt and answer, streamed or not."""
    expected = rt.generate(CHAT, SamplingParams(max_tokens=6))
    body = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = post(url, "/v1/chat/completions", body).json()
    assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    chunks = events(post(url, "/v1/chat/completions", {**body, "stream": True}).text)
    assert chunks[0]["prompt_token_ids"] == list(expected.prompt_token_ids)
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert streamed == list(expected.token_ids)


def test_prompt_logprobs_are_the_runtimes(rt: Runtime, url: str):
    """`prompt_logprobs` has an entry for every token of the prompt, the first of which is null."""
    expected = rt.generate(CHAT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    body = {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    found = post(url, "/v1/chat/completions", body).json()["prompt_logprobs"]
    assert expected.prompt_logprobs is not None
    assert found[0] is None and len(found) == len(expected.prompt_token_ids)
    for entry, score in zip(found[1:], expected.prompt_logprobs[1:], strict=True):
        assert score is not None
        assert entry[str(score.token_id)]["logprob"] == pytest.approx(score.logprob)


def test_messages_of_all_roles_and_parts(ai: openai.OpenAI, rt: Runtime):
    """Parts of a content are joined, and "developer" is the template's "system"."""
    said: Any = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "someone"},
    ]
    plain = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    expected = rt.generate(plain, SamplingParams(max_tokens=12))
    assert _greedy(ai, messages=said).choices[0].message.content == expected.text


def test_a_dumped_answer_can_be_sent_back(ai: openai.OpenAI):
    """The official client's answer goes back as its dump, with all fields that it knows."""
    asked: Any = {"model": NAME, "max_completion_tokens": 4, "temperature": 0}
    answer = ai.chat.completions.create(messages=CHAT, **asked).choices[0].message
    plain = {"role": "assistant", "content": answer.content}
    for dumped in (answer.model_dump(), {**answer.model_dump(), "annotations": []}):
        again = ai.chat.completions.create(messages=[*CHAT, dumped, *CHAT], **asked)
        same = ai.chat.completions.create(messages=[*CHAT, plain, *CHAT], **asked)
        assert again.choices[0].message.content == same.choices[0].message.content


def test_async_client(url: str):
    """The asynchronous client gets the same answers, many at a time, streamed or not."""

    async def ask() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:

            async def whole(number: int) -> str:
                answer: Any = await ai.chat.completions.create(
                    model=NAME, messages=CHAT, max_completion_tokens=9, seed=number
                )
                return answer.choices[0].message.content

            async def streamed(number: int) -> str:
                chunks: Any = await ai.chat.completions.create(
                    model=NAME, messages=CHAT, max_completion_tokens=9, seed=number, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in chunks])

            both = await asyncio.gather(*map(whole, range(16)), *map(streamed, range(16)))
            return list(both[:16]), list(both[16:])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
    assert len(set(whole)) == 16
