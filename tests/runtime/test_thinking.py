"""A model that thinks, on a real runtime: what it thought, its budget, and grammars after it."""

from __future__ import annotations

import json
from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    letters = ["\n", *map(chr, range(32, 126))]
    vocab = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(backend, eos_token_ids=(), chat_template=TEMPLATE)
    with Runtime(tiny_llama(), tokenizer=tokenizer, speculation="lookup", **OPTIONS) as rt:
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
