"""A model that thinks, on a real runtime: what it thought, its budget, and grammars after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidRequestError
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.testing import OPTIONS, tiny_llama

CHAT = [{"role": "user", "content": "hi"}]
OPEN, CLOSED = {"enable_thinking": True}, {"enable_thinking": False}
# As Qwen3's: the switch decides how the prompt ends, and earlier thinking is left out.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined %}<think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


def _tokenizer() -> Tokenizer:
    letters = ["\n", *map(chr, range(32, 126))]
    vocab = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend, eos_token_ids=(), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime(tiny_llama(), tokenizer=_tokenizer(), speculation="lookup", **OPTIONS) as rt:
        yield rt


def test_what_was_thought_is_apart(rt):
    """In completions, streams and conversations of chats; a plain prompt's text is as it comes."""
    params = SamplingParams(max_tokens=24, max_thinking_tokens=3, template_kwargs=OPEN)
    found = rt.generate(CHAT, params).samples[0]
    assert found.reasoning and found.text and "think" not in found.reasoning
    assert found.num_reasoning_tokens == 3 + len("\n") + 1
    assert len(found.token_ids) == 24 and found.finish_reason == "length"

    pieces = list(rt.stream(CHAT, params))
    assert "".join(piece.reasoning for piece in pieces) == found.reasoning
    assert "".join(piece.text for piece in pieces) == found.text
    assert sum(piece.num_reasoning for piece in pieces) == found.num_reasoning_tokens

    conversation = rt.conversation()
    conversation.send("hi", params)
    answer = {"content": found.text, "reasoning_content": found.reasoning}
    assert conversation.history == [*CHAT, {"role": "assistant", **answer}]
    conversation.send("so?", params)
    said = [*CHAT, {"role": "assistant", **answer}, {"role": "user", "content": "so?"}]
    prompt = rt.tokenizer.apply_chat_template(said, variables=OPEN)
    assert conversation.turns[1].prompt == tuple(prompt[conversation.turns[1].num_kept :])

    rendered = rt.tokenizer.decode(rt.tokenizer.apply_chat_template(CHAT, variables=OPEN))
    plain = rt.generate(rendered, SamplingParams(max_tokens=24, max_thinking_tokens=3))
    assert plain.reasoning is None and found.reasoning in plain.text
    asked = SamplingParams(max_tokens=24, max_thinking_tokens=3, separate_reasoning=True)
    assert rt.generate(rendered, asked).samples[0].text == found.text
    kept = SamplingParams(
        max_tokens=24, max_thinking_tokens=3, separate_reasoning=False, template_kwargs=OPEN
    )
    raw = rt.generate(CHAT, kept)
    assert raw.reasoning is None and found.reasoning in raw.text and "</think>" in raw.text
    with pytest.raises(InvalidRequestError, match="template_kwargs are variables"):
        rt.generate("hi", params)


def test_a_grammar_binds_each_sample_after_its_thinking(rt):
    """With speculation, many samples at once, and a schema that the answer alone has to match."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for kwargs in (OPEN, CLOSED):
        params = SamplingParams(
            max_tokens=48,
            max_thinking_tokens=9,
            template_kwargs=kwargs,
            json_schema=schema,
            temperature=1.0,
            n=6,  # more than there are slots
            seed=3,
        )
        samples = rt.generate(CHAT, params).samples
        assert {sample.finish_reason for sample in samples} == {"stop"}
        assert all(json.loads(sample.text)["a"] in ("x", "y") for sample in samples)
        assert all(bool(sample.reasoning) == (kwargs is OPEN) for sample in samples)
        alone = rt.generate(CHAT, SamplingParams(**{**vars(params), "n": 1}))
        assert alone.samples[0].token_ids == samples[0].token_ids


@pytest.mark.release
def test_tokens_of_thinking_are_those_without_speculation():
    """With budgets that end inside of what is proposed, and with a grammar after the thinking."""
    tokenizer = _tokenizer()
    bias = dict.fromkeys(tokenizer.encode("ab"), 30.0)  # it repeats itself, so that much is right
    prompts, params = list[Any](), list[SamplingParams]()
    for budget in (None, 6, 20):
        for regex in (None, "[ab]{9}"):
            for more in ({}, {"temperature": 1.0, "logprobs": 0}):
                prompts.append([{"role": "user", "content": "abab" * 3}])
                params.append(
                    SamplingParams(
                        max_tokens=40,
                        max_thinking_tokens=budget,
                        regex=regex,
                        template_kwargs=OPEN,
                        logit_bias=bias,
                        seed=len(params),
                        **more,
                    )
                )
    found = []
    for speculation in (None, "lookup"):
        options: dict[str, Any] = {**OPTIONS, "deterministic": True, "speculation": speculation}
        with Runtime(tiny_llama(), tokenizer=tokenizer, **options) as runtime:
            found.append(runtime.generate(prompts, params))
            num_accepted = runtime.stats().num_accepted_tokens
            assert (num_accepted > 10) == (speculation is not None)
    for one, other in zip(*found, strict=True):
        assert (other.token_ids, other.finish_reason) == (one.token_ids, one.finish_reason)
        assert (other.reasoning, other.text) == (one.reasoning, one.text)
