"""Chat templates, rendered by Jinja in a sandbox.

They get the same variables as from `transformers.utils.chat_template_utils`, so that texts are the
same. That module is not used because importing it takes longer than everything else that a short
answer needs; `tests/models/test_chat_template.py` compares the two. Templates are untrusted code:
they get plain data only, and no attribute with an underscore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, final

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Keys under which clients send a model's reasoning; templates read one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What compares the type of a part of a message.
_THINKING_PART = re.compile(r"""\btype\W{1,4}== *['"]thinking['"]""")


def render(
    source: str,  # the template
    messages: Any,
    special_tokens: Mapping[str, str],  # names that the template may use, and their texts
    *,
    tools: Any = None,
    add_generation_prompt: bool,
    variables: Any = None,
) -> str:
    """Return the text of a chat.

    Args:
      messages: mappings with a `role` and a `content`, of plain data. Keys whose value is None are
        omitted, as in transformers.
      tools: schemas of functions that the model may call, of plain data; None without any.
      variables: further variables of the template, of plain data.

    Raises:
      TypeError: a message is not a mapping, or does not hold plain data.
      jinja2.TemplateError: the template is damaged, or refuses the messages.
    """
    plain = _plain(messages)
    for message in plain:
        if not isinstance(message, dict):
            raise TypeError(f"a message must be a mapping, not {message!r}")
    # Magistral's and Ministral's templates have it as a part of the content.
    in_parts = _THINKING_PART.search(source) is not None and "reasoning_content" not in source
    return _compiled(source).render(
        messages=[_with_thoughts(_given(message), in_parts=in_parts) for message in plain],
        tools=_plain(tools),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        # SmolLM3's template has the tools as xml_tools.
        **{"xml_tools": _plain(tools), **_plain(special_tokens), **_plain(variables or {})},
    )


def check(source: str) -> None:
    """Raise jinja2.TemplateError if it is not a template."""
    _compiled(source)


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads; none if it is damaged."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except TemplateError:
        return frozenset()


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(names)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON unescaped; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@final
class _Generation(Extension):
    """The block {% generation %}, which marks an answer for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_contents")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _contents(self, caller: Any) -> str:
        return caller()


@final
class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, *items: Any) -> dict[Any, Any]:
        return dict.fromkeys(*items)


@final
class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, whose attributes have no underscore at the beginning."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a template may name one "self"
        self, *items = args
        attributes = dict(*items, **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot set {name!r}: names must not begin with _")


def _given(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _with_thoughts(message: dict[str, Any], *, in_parts: bool) -> dict[str, Any]:
    thoughts = next((message[name] for name in _REASONING if name in message), None)
    if thoughts is None:
        return message
    found = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    if in_parts and thoughts:
        content = found.get("content")
        if not isinstance(content, list):
            content = [{"type": "text", "text": content}] if content else []
        found["content"] = [{"type": "thinking", "thinking": thoughts}, *content]
    return found


def _plain(value: Any) -> Any:
    """Return a copy; raise TypeError for types whose methods a template could call."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not text, a number, a list or a mapping")
