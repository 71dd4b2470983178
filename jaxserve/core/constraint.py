"""The constraint on a request's output: a grammar in one of several notations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from jaxserve.core.errors import InvalidSamplingParamsError

Notation = Literal["json_schema", "regex", "grammar", "choice"]

_ANY_OBJECT = '{"type": "object"}'
_FIELDS = ("json_schema", "regex", "grammar", "choice", "json_object")
# Maximum number of characters of a grammar's text.
MAX_TEXT = 1 << 17
# Maximum number of lines and opening brackets of a grammar, or opening brackets of a schema.
# llguidance recurses without a limit through rules and references, each of which counts here, with
# 10 kB of stack or less.
MAX_PARTS = 10_000


@final
@dataclass(frozen=True)
class Constraint:
    """A grammar.

    Attributes:
      text: a JSON schema, a regular expression, a Lark or GBNF grammar, or a JSON list of strings.
    """

    notation: Notation
    text: str

    @classmethod
    def of(
        cls,
        *,
        json_schema: str | None,
        regex: str | None,
        grammar: str | None,
        choice: tuple[str, ...] | None,
        json_object: bool,
    ) -> Constraint | None:
        if json_object:
            return cls("json_schema", _ANY_OBJECT)
        if json_schema is not None:
            return cls("json_schema", json_schema)
        if regex is not None:
            return cls("regex", regex)
        if grammar is not None:
            return cls("grammar", grammar)
        return None if choice is None else cls("choice", json.dumps(choice))


def schema_text(schema: Any) -> str:
    """Return a JSON schema as text, properties in order; else InvalidSamplingParamsError."""
    try:
        if isinstance(schema, str):
            parsed, text = json.loads(schema), schema
        else:
            text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
            parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSamplingParamsError(
            f"json_schema is not JSON: {error}; pass a mapping, or its JSON text"
        ) from None
    if not isinstance(parsed, (dict, bool)):
        raise InvalidSamplingParamsError(
            f"json_schema={text[:80]} is not a schema; pass a JSON object, such as "
            '{"type": "object"}'
        )
    return text


def check_constraints(params: Any) -> None:
    """Raise InvalidSamplingParamsError if the constraints of `SamplingParams` are wrong.

    At most one may be given, not empty, not too long, and not against another parameter.
    """
    given = [name for name in _FIELDS if getattr(params, name) not in (None, False)]
    if len(given) > 1:
        raise InvalidSamplingParamsError(
            f"{' and '.join(given)} were given; pass one of {', '.join(_FIELDS)}"
        )
    if not given:
        return
    (name,) = given
    value = getattr(params, name)
    if name == "choice":
        are_texts = isinstance(value, tuple) and all(isinstance(t, str) and t for t in value)
        if not are_texts or not value:
            raise InvalidSamplingParamsError(
                f"choice={value!r} is not allowed; pass a list of strings that are not empty"
            )
    elif name == "json_object":
        if value is not True:
            raise InvalidSamplingParamsError(
                f"json_object={value!r} is not allowed; pass True or False"
            )
    elif not isinstance(value, str) or not value:
        raise InvalidSamplingParamsError(
            f"{name}={value!r} is not allowed; pass a string that is not empty"
        )
    length = sum(map(len, params.choice)) if name == "choice" else len(str(value))
    if length > MAX_TEXT:
        raise InvalidSamplingParamsError(
            f"{name} has {length} characters, and at most {MAX_TEXT} are allowed; pass a smaller "
            "grammar"
        )
    num_parts = _num_parts(name, value)
    if num_parts > MAX_PARTS:
        raise InvalidSamplingParamsError(
            f"{name} has {num_parts} rules, objects and lists, counted by lines and opening "
            f"brackets, and at most {MAX_PARTS} are allowed; pass a smaller grammar"
        )


def _num_parts(name: str, value: Any) -> int:
    """Return a bound on the nesting depth of a grammar's parts."""
    if name == "grammar":
        return sum(map(value.count, "\n{[("))
    return sum(map(value.count, "{[")) if name == "json_schema" else 0
