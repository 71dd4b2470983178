"""Grammars that bind after the thinking, and the budget of the thinking."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers

from jaxserve.core.json_schema import lark_rules
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import TextAssembler
from jaxserve.engine.grammars import Grammars
from jaxserve.engine.matcher import Matcher, ThinkingMatcher
from jaxserve.models.thinking import Thinking
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.models.tool_calls import HARMONY
from jaxserve.models.tool_grammars import grammar_of

pytestmark = pytest.mark.fast

_TAGS = "{{ m.content }}<think></think>"
_HARMONY = "<|channel|>analysis"
_END = "<end>"


def _tokenizer(template: str) -> Tokenizer:
    """Return one with a token for each letter and mark; those of harmony are control tokens."""
    letters = ["\n", " ", *map(chr, range(33, 127))]
    vocab = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_tokens(["<think>", "</think>"])
    backend.add_special_tokens(
        [_END, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
    )
    (end,) = backend.encode(_END).ids
    return Tokenizer(backend, eos_token_ids=(end,), chat_template=template)


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, tuple[Tokenizer, Grammars]]]:
    made = {}
    for name, template in (("tags", _TAGS), ("harmony", _HARMONY)):
        tokenizer = _tokenizer(template)
        ends, size = tokenizer.eos_token_ids, tokenizer.vocab_size
        grammars = Grammars(tokenizer, ends, size, max_wait_s=300)
        made[name] = tokenizer, grammars
    yield made
    for _, grammars in made.values():
        grammars.close()


def _matcher(
    kind: tuple[Tokenizer, Grammars], prompt: str, **params: object
) -> tuple[Matcher | ThinkingMatcher, SamplingParams]:
    tokenizer, grammars = kind
    given = SamplingParams(**params)  # pyrefly: ignore[bad-argument-type]
    grammar = None if given.constraint is None else grammars.compiled(given.constraint)
    request = Request(
        id="a",
        prompt=tuple(tokenizer.encode(prompt, False)),
        params=given,
        arrival_s=0.0,
        grammar=grammar,
        thinking=tokenizer.thinking_after(tokenizer.encode(prompt, False)),
    )
    return grammars.matcher(request), given


def _answer(
    kind: tuple[Tokenizer, Grammars], prompt: str, wants: str, *, most: int = 0, **params: object
) -> str:
    """Return what a model writes that wants to write a text, as far as its masks allow.

    At each place it takes the text's next token, or a forced one, or else the first letter that is
    allowed, and goes on with the text. A step has up to `most` proposals, which are what the model
    wants. It starts again once, as after a preemption.
    """
    tokenizer, grammars = kind
    matcher, given = _matcher(kind, prompt, **params)
    output: list[int] = []
    rest = tokenizer.encode(wants, False)
    has_restarted = False
    while not matcher.is_complete and len(output) < 80:
        if len(output) >= 4 and not has_restarted:
            has_restarted = True
            matcher.follow(output[:1])
            matcher.follow(output)
        new = [] if given.logprobs is not None else matcher.forced()
        if not new:
            proposed = matcher.propose(rest[:most], most, forces=False)
            words = grammars.masks((0,) * (1 + len(proposed)), [matcher]).words()
            for mask, after in zip(words, (*proposed, None), strict=True):
                if not rest:
                    break
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
                if allowed[rest[0]]:
                    new.append(rest.pop(0))
                else:
                    new.append(int(np.flatnonzero(allowed)[0]))
                if new[-1] != after:
                    break
            if not new:
                break
        output += new
        matcher.follow(output)
        assert matcher.error is None
    return tokenizer.decode(output, skip_special_tokens=False)


_BOUND = [
    # The model thinks as long as it likes, and the grammar binds what follows.
    ("tags", "[a]", "<think>\nso </think>ab", "<think>\nso </think>ab"),
    ("tags", "[a]<think>\n", "so b</think>xxb", "so b</think>ab"),
    # It may not end inside its thinking.
    ("tags", "[a]<think>\n", f"so{_END}</think>ab", None),
    # One that does not think is bound from the start, by the prompt or by its own choice.
    ("tags", "[a]<think>\n\n</think>\n\n", "<think>ab", "ab"),
    ("tags", "[a]", "ab<think>", "ab"),
    ("tags", "[a]", "xab", None),
    # Harmony: after its analysis comes the final channel.
    (
        "harmony",
        "<|start|>assistant",
        "analysis<|message|>b<|end|>zab",
        "<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>ab",
    ),
    ("harmony", "<|start|>assistant", "final<|message|>ab", "<|channel|>final<|message|>ab"),
]


# Whether forced tokens are chosen by masks, as with log-probabilities, and proposals of a step.
_ways = pytest.mark.parametrize(
    "way",
    [{}, {"logprobs": 0}, {"most": 3}, {"most": 9, "logprobs": 0}],
    ids=["forced", "by masks", "proposed", "proposed by masks"],
)


@_ways
@pytest.mark.parametrize(("kind", "prompt", "wants", "written"), _BOUND)
def test_a_grammar_binds_from_the_end_of_the_thinking(kinds, kind, prompt, wants, written, way):
    """Also where each token is chosen, and where some are proposed."""
    found = _answer(kinds[kind], prompt, wants, regex="ab{1,3}c?", **way)
    if written is None:
        assert _END not in found and found.removeprefix("so").replace("</think>", "")[:1] != "x"
    else:
        assert found[: len(written)] == written
        assert found[len(written) :].strip("bc") in ("", _END)


@_ways
def test_a_call_has_a_head_of_its_own(kinds, way):
    """A grammar that begins with harmony's head follows the analysis without the final channel."""
    tokenizer, _ = kinds["harmony"]
    channel = tokenizer.added_token_id("<|channel|>")
    grammar = f'start: <[{channel}]> "commentary to=functions.f" /[0-9]/'
    call = "<|channel|>commentary to=functions.f7"
    for budget in (None, 2):
        found = _answer(
            kinds["harmony"],
            "<|start|>assistant",
            f"hm{'<|end|>' if budget is None else ''}{call}",
            grammar=grammar,
            max_thinking_tokens=budget,
            **way,
        )
        assert found[-1].isdigit()
        assert found[:-1] == f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call[:-1]}"


@_ways
@pytest.mark.parametrize("regex", [None, "yes|no"])
def test_thinking_ends_with_its_budget(kinds, regex, way):
    """After that many tokens its end is written, and the answer goes on, bound by the grammar."""
    given = {"regex": regex, "max_thinking_tokens": 3, **way}
    said = "yes" if regex else "yes, it is"
    for prompt, before in (("[a]<think>\n", ""), ("[a]", "<think>")):
        found = _answer(kinds["tags"], prompt, f"{before}abc{said}", **given)
        assert found == f"{before}abc\n</think>{said}"
    found = _answer(
        kinds["harmony"], "<|start|>assistant", f"<|channel|>analysis<|message|>abc{said}", **given
    )
    found = found.replace("<|channel|>" * 2, "<|channel|>")
    head = "<|start|>assistant<|channel|>final<|message|>"
    assert found == f"<|channel|>analysis<|message|>abc<|end|>{head}{said}"
    none = _answer(kinds["tags"], "[a]<think>\n", said, **{**given, "max_thinking_tokens": 0})
    assert none == f"\n</think>{said}"


@pytest.mark.parametrize(
    ("regex", "budget", "before", "text", "proposed"),
    [
        # What the model thinks is free, up to the token that ends it.
        ("a", None, "so", " it is</think>", " it is"),
        ("a", None, "so", f" it{_END} is", " it"),
        ("a", 7, "so", " it is so", " it "),  # the seventh token is chosen, and the end forced
        ("a", 2, "so", "it", ""),  # the end is forced
        ("a", 9, "so</think>", "ab", ""),  # which would complete the answer
        ("a{9}", 9, "so</think>", "aab", "aa"),
        # Without a grammar so is the answer, and nothing ends it in between.
        (None, 9, "so", "</think>it is so, ", "</think>it is so, "),
        (None, 9, "so</think>it", f" is so{_END}!", " is so"),
    ],
)
def test_proposals_end_where_something_is_bound(kinds, regex, budget, before, text, proposed):
    tokenizer = kinds["tags"][0]
    given = {"regex": regex, "max_thinking_tokens": budget}
    matcher, _ = _matcher(kinds["tags"], "[a]<think>\n", **given)
    output = tokenizer.encode(before, False)
    matcher.follow(output)
    for _ in range(2):  # it stands where it stood
        found = matcher.propose(tokenizer.encode(text, False), 20, forces=False)
        assert tokenizer.decode(list(found), skip_special_tokens=False) == proposed
        assert matcher.proposed == tuple(found)
    matcher.follow([*output, *tokenizer.encode("a", False)])
    assert matcher.proposed == () and matcher.error is None


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ("f", '<|channel|>final<|message|>{"a": 1}'),
        ("c", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
    ],
)
def test_harmony_answers_or_calls_after_its_analysis(kinds, wants, message):
    """With tools and a format each message has its own head, which the model chooses."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    grammar = grammar_of(
        HARMONY,
        [{"name": "f", "parameters": {"type": "object", "properties": {}}}],
        kinds["harmony"][0].added_token_id,
        may_be_several=False,
        answer=lark_rules(schema, "answer"),
    )
    found = _answer(kinds["harmony"], "<|start|>assistant", f"so<|end|>{wants}", grammar=grammar)
    begin = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    assert found.startswith(begin + message)


def test_thinking_is_counted_and_separated_in_pieces(kinds):
    """Tokens of the thinking count with its marks; control tokens show it where others do not."""
    tokenizer, _ = kinds["harmony"]
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>ok"
        "<|constrain|>"
    )
    tokens = tokenizer.encode(text, False)
    thinking = tokenizer.thinking_after(tokenizer.encode("<|start|>assistant", False))
    assert isinstance(thinking, Thinking)
    decoder = tokenizer.stream_decoder(shown=thinking.shown)
    assembler = TextAssembler(decoder, (), thinking=thinking)
    parts = []
    for token in tokens:
        assembler.push([token])
        parts.append(assembler.take(is_final=False))
    assembler.finish()
    parts.append(assembler.take(is_final=True))
    assert "".join(r for r, _ in parts) == "hm"
    assert "".join(c for _, c in parts).startswith("ok")
    assert assembler.parts()[0] == "hm"
    assert assembler.num_reasoning == len(tokens) - 3
