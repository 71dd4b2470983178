"""Chat templates for tools, and how templates read calls; transformers 5.24.0 has the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import pre_tokenizers

from jaxserve.core.errors import InvalidRequestError
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.models.tokenizer_files import read_gguf_tokenizer
from tests.common.vocabularies import byte_level, byte_level_json

pytestmark = pytest.mark.fast

DEFAULT = "D{{ tools is none }}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL_USE = "T{{ tools | length }}{% for m in messages %}{{ m.content }}|{% endfor %}"
ASKED = [{"role": "user", "content": "q"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def _folder(path: Path, **settings: Any) -> Path:
    (path / "tokenizer.json").write_text(byte_level_json())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _text(tokenizer: Tokenizer, tools: Any, chat: Any = ASKED) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(chat, tools=tools), False)


def _listed(path: Path) -> Path:
    named = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "R"}
    given = [{"name": name, "template": source} for name, source in named.items()]
    return _folder(path, chat_template=given)


def _as_files(path: Path) -> Path:
    _folder(path, chat_template="the files replace it")
    (path / "chat_template.jinja").write_text(DEFAULT)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    return path


def _one(path: Path) -> Path:
    return _folder(path, chat_template=DEFAULT)


@pytest.mark.parametrize("write", [_listed, _as_files, _one])
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_chats_with_tools_have_the_template_for_them(tmp_path, write, tools):
    """The template named "tool_use" writes chats with tools, also with an empty list of them."""
    folder = write(tmp_path)
    mine = Tokenizer.from_folder(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(ASKED, tools=tools, tokenize=False)
    assert _text(mine, tools) == expected
    mine.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert _text(again, tools) == expected and again.fingerprint == mine.fingerprint


def test_a_template_for_tools_alone(tmp_path):
    """Chats without tools are refused, as by transformers, and those with tools are not."""
    folder = _folder(tmp_path, chat_template=[{"name": "tool_use", "template": TOOL_USE}])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="no default"):
        theirs.apply_chat_template(ASKED, tokenize=False)
    mine = Tokenizer.from_folder(folder)
    with pytest.raises(InvalidRequestError, match="no chat template for chats without tools"):
        mine.apply_chat_template(ASKED)
    assert _text(mine, TOOLS) == theirs.apply_chat_template(ASKED, tools=TOOLS, tokenize=False)


def test_named_templates_of_a_gguf_file():
    """They are read under the names that gguf 0.19.0 writes them under."""
    keys = gguf.Keys.Tokenizer
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    metadata = {
        keys.MODEL: "gpt2",
        keys.PRE: "gpt-2",
        keys.LIST: tokens,
        keys.MERGES: [],
        keys.EOS_ID: len(tokens) - 1,
        keys.CHAT_TEMPLATE: DEFAULT,
        keys.CHAT_TEMPLATES: ["tool_use"],
        keys.CHAT_TEMPLATE_N.format(name="tool_use"): TOOL_USE,
    }
    read = read_gguf_tokenizer(metadata, "a file")
    assert (read.chat_template, read.tool_template) == (DEFAULT, TOOL_USE)


def test_a_chat_goes_on_by_the_template_for_tools():
    """What follows an answer is written by the template that wrote the chat."""
    tokenizer = byte_level(chat_template=DEFAULT, tool_template=TOOL_USE)
    answer, result = {"role": "assistant", "content": "a"}, [{"role": "tool", "content": "7"}]

    def behind(tools: Any) -> str:
        found = tokenizer.chat_continuation(ASKED, answer, result, tools=tools)
        return tokenizer.decode(found or (), False)

    assert (behind(None), behind([])) == ("7", "|7|")
    other = byte_level(chat_template=DEFAULT)
    assert other.fingerprint != tokenizer.fingerprint


_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<%>{% endfor %}"
    "{% endfor %}"
)
_ALTERNATING = (
    "{% if messages[0].role != 'user' or messages[1].tool_calls[0].id | length != 9 %}"
    "{{ raise_exception('no') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "takes_text"),
    [
        ("{{ '```json\\n' + c.function.arguments + '\\n```' }}", True),
        ("{{ c.function.arguments }}", True),
        ("{{ c['function']['arguments'] }}</call>", True),
        ("{{ c.function.arguments if c.function.arguments is string else 1 }}", True),
        ("{{ c.function.arguments | tojson }}", False),
        ("{{ c.function | tojson }}", False),
        ("{{ c.function.arguments.items() | list }}", False),
        ("{% for name, value in c.function.arguments | items %}{{ name }}{% endfor %}", False),
        ("{{ c.function.name }}", False),
        ("{{ raise_exception('no calls') }}", False),
    ],
)
@pytest.mark.parametrize("before", ["", _ALTERNATING])
def test_templates_that_take_arguments_as_text(source, takes_text, before):
    """A template that writes a text as it is gets what the client sent; others get an object."""
    tokenizer = byte_level(chat_template=before + _CALLS.replace("<%>", source))
    assert tokenizer.takes_text_arguments(has_tools=False) is takes_text
    assert tokenizer.takes_text_arguments(has_tools=True) is takes_text


def test_what_is_none_in_a_message_is_left_out(tmp_path):
    """OpenAI's client sends `content: null` beside calls, which a template must not write."""
    source = (
        "{% for m in messages %}[{{ m.content }}{{ m.content is defined }}{{ m.x }}]{% endfor %}"
    )
    folder = _folder(tmp_path, chat_template=source)
    chat = [*ASKED, {"role": "assistant", "content": None, "x": None}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(chat, tokenize=False)
    assert _text(Tokenizer.from_folder(folder), None, chat) == expected == "[qTrue][False]"
