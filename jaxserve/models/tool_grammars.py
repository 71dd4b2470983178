"""Grammars of answers that must call a tool, in the notation of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

from jaxserve.core.errors import InvalidGrammarError
from jaxserve.core.json_schema import CALENDAR, lark_rules
from jaxserve.models import tool_values
from jaxserve.models.tool_calls import (
    JsonArguments,
    JsonCall,
    NamedCall,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
    ToolFormat,
    parameters_of,
)

TokenOf = Callable[[str], int | None]

# What may be an added token of a tokenizer.
_TAG = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")
# What may be one within a tag.
_IN_TAG = re.compile(r"(｜[A-Z]+｜)")
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_ROOT = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
_ROOT |= {"definitions", "$schema", "$id", "x-guidance"} | _NOTES
_STRING = frozenset(("type", "enum", "const", "minLength", "maxLength", "pattern", "format"))
_ARRAY = frozenset(("type", "items", "minItems", "maxItems"))
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_PATTERNS = {
    "date": CALENDAR["date"],
    "date-time": rf"{CALENDAR['date-time']}{_TIME}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_TIME})$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
_MAX_DEPTH = 16


def grammar_of(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    token_of: TokenOf,  # returns the token of a text that is one added token
    *,
    may_be_several: bool,
    answer: Sequence[str] = (),
) -> str:
    """Return a Lark grammar of answers that call one of the tools, or several.

    Args:
      tools: with `name` and perhaps `parameters`, a JSON schema of an object.
      answer: the rules of an answer without calls, from `answer` on; none if a call is demanded.

    Raises:
      InvalidGrammarError: the parameters of a tool cannot be enforced in this format.
    """
    lines = _Lines(form, token_of)
    for i, tool in enumerate(tools):
        try:
            lines.add_tool(f"tool{i}", tool)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammarError(
                f"the parameters of the tool {tool['name']!r} cannot be compiled: {error}"
            ) from error
    one = " | ".join(f"tool{i}" for i in range(len(tools)))
    more = (
        f" ({lines.text(form.between)} one)*" if may_be_several and form.between is not None else ""
    )
    calls = f"{lines.text(form.begin + form.opening)} one{more}"
    calls += f" {lines.text(form.closing + form.end)}"
    is_many = may_be_several and form.separator is not None
    start = f"calls ({lines.text(form.separator or '')} calls)*" if is_many else "calls"
    head = ["%llguidance {}", f"start: {start}", f"calls: {calls}", f"one: {one}"]
    if answer:
        whole = f"{lines.text(form.answer)} answer".strip()
        head[1:2] = [f"start: {whole} | called", f"called: {start}"]
    return "\n".join([*head, *lines.lines, *answer, ""])


@final
class _Lines:
    """The rules of a grammar, as they are added."""

    def __init__(self, form: ToolFormat, token_of: TokenOf):
        self.lines: list[str] = []
        self._form = form
        self._token_of = token_of
        self._num = 0

    def text(self, text: str) -> str:
        """Return a text in Lark, with the parts that are added tokens as these tokens."""
        parts: list[str] = []
        plain = ""
        for part in self._cut(text):
            is_tag = _TAG.fullmatch(part) or _IN_TAG.fullmatch(part)
            token = self._token_of(part) if is_tag else None
            if token is None:
                plain += part
                continue
            parts += [json.dumps(plain, ensure_ascii=False)] if plain else []
            parts.append(f"<[{token}]>")
            plain = ""
        return " ".join([*parts, json.dumps(plain, ensure_ascii=False)] if plain else parts)

    def _cut(self, text: str) -> Iterable[str]:
        """Yield the parts of a text that may be added tokens, and those between them."""
        for part in _TAG.split(text):
            is_token = _TAG.fullmatch(part) and self._token_of(part) is not None
            yield from filter(None, (part,) if is_token else _IN_TAG.split(part))

    def add_tool(self, rule: str, tool: Mapping[str, Any]) -> None:
        call, name, schema = self._form.call, tool["name"], parameters_of(tool)
        if isinstance(call, JsonCall):
            begin = f"{json.dumps(call.name)}: {json.dumps(name)}, {json.dumps(call.arguments)}: "
            first = json.dumps("{" + begin)
            if call.is_keyed:
                first = json.dumps("{" + f"{json.dumps(name)}: ")
            if call.number:
                before, after = f'{{{json.dumps(call.number)}: "', f'", {begin}'
                first = f"{json.dumps(before)} /0|[1-9][0-9]?/ {json.dumps(after)}"
            # A separate JSON schema, so that references in it begin at its own root.
            self.lines.append(f'{rule}: {first} {rule}_arguments "}}"')
            self.lines += lark_rules(schema, f"{rule}_arguments")
            return
        assert isinstance(call, NamedCall)
        begin = f"{self.text(call.begin)} {self._name(call, name)} {self.text(call.after)}"
        arguments = call.arguments
        if isinstance(arguments, JsonArguments):
            self.lines.append(f"{rule}: {begin} {rule}_arguments {self.text(call.end)}")
            self.lines += lark_rules(schema, f"{rule}_arguments")
            return
        root = _as_object(schema)
        pairs = [
            (self._pair(arguments, key, each, schema), key in root.get("required", ()))
            for key, each in _properties(root).items()
        ]
        separator = ", " if isinstance(arguments, PythonArguments) else ","
        separator = "" if isinstance(arguments, TaggedArguments) else separator
        self.lines.append(f"{rule}: {begin} {self._chain(pairs, separator)} {self.text(call.end)}")

    def _name(self, call: NamedCall, name: str) -> str:
        if call.is_numbered:
            return f"{self.text(f'functions.{name}:')} /0|[1-9][0-9]?/"
        return self.text(name)

    def _rule(self, body: str) -> str:
        self._num += 1
        name = f"part{self._num}"
        self.lines.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any, root: Mapping[str, Any]) -> str:
        self._num += 1
        name = f"part{self._num}"
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self.lines += lark_rules({**schema, **shared} if isinstance(schema, dict) else schema, name)
        return name

    def _chain(self, pairs: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return pairs in their order, those that are not required or left out."""
        if not separator:
            return " ".join(pair if is_needed else f"{pair}?" for pair, is_needed in pairs)
        comma = self.text(separator)
        first = more = ""  # what follows a comma or the beginning, and what follows a pair
        for pair, is_needed in reversed(pairs):
            here = f"{pair} {more}"
            if is_needed:
                first, more = here, self._rule(f"{comma} {here}")
            else:
                first = f"{here} | {first}" if first else f"({here})?"
                more = self._rule(f"({comma} {pair})? {more}")
            first = self._rule(first)
        return first

    def _pair(self, arguments: Any, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        if isinstance(arguments, TaggedArguments):
            is_text = "string" in tool_values.kinds_of(schema, root)
            begin = self.text(f"{arguments.begin}{key}{arguments.before(is_text=is_text)}")
            return self._rule(f"{begin} {self._tagged(arguments, schema, root)}")
        if isinstance(arguments, PythonArguments):
            return self._rule(f"{self.text(f'{key}=')} {self._python(schema, root)}")
        assert isinstance(arguments, QuotedArguments)
        value = self._quoted(arguments.quote, schema, root, _MAX_DEPTH)
        return self._rule(f"{self.text(f'{key}:')} {value}")

    def _tagged(self, arguments: TaggedArguments, schema: Any, root: Mapping[str, Any]) -> str:
        """Return a value and its end tag: plain text if it may be a string."""
        kinds = tool_values.kinds_of(schema, root)
        end = arguments.end
        if "string" not in kinds:
            return f"{self._json(schema, root)} {self.text(end)}"
        schema = _resolved(schema, root)
        if kinds != {"string"} and "enum" in schema:
            raise ValueError('"enum" of strings and other types is not supported in this format')
        return self._string(schema if kinds == {"string"} else {}, end)

    def _string(self, schema: Mapping[str, Any], end: str) -> str:
        """Return a text that a schema of a string allows, and the tag that ends it."""
        unknown = [key for key in schema if key not in _STRING | _NOTES]
        if unknown:
            raise ValueError(
                f'"{unknown[0]}" of a string is not supported in this format; leave it out'
            )
        if "enum" in schema or "const" in schema:
            values: Iterable[Any] = schema.get("enum", [schema.get("const")])
            texts = [each for each in values if isinstance(each, str) and end.strip() not in each]
            if not texts:
                raise ValueError("no value of the enum can be written in this format")
            options = " | ".join(self.text(text) or '""' for text in texts)
            return f"({options}) {self.text(end)}"
        parts = []
        if "minLength" in schema or "maxLength" in schema:
            bounds = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
            parts.append(f"/(?s:.){{{bounds}}}/")
        pattern = schema.get("pattern")
        if pattern is None and "format" in schema:
            pattern = _PATTERNS.get(schema["format"])
            if pattern is None:
                raise ValueError(
                    f'"format": {json.dumps(schema["format"])} is not supported in this format of '
                    f"calls; give a pattern, or one of {', '.join(_PATTERNS)}"
                )
        if pattern is not None:
            parts.append(_whole(pattern))
        self._num += 1
        name = f"TEXT{self._num}"
        self.lines.append(f"{name}: {' & '.join(parts) or '/(?s:.*)/'}")
        tag = end.strip()
        if self._token_of(tag) is not None:  # a token, which no text has in it
            return f"{name} {self.text(end)}"
        before, *rest = self._cut(end)
        if rest and self._token_of(rest[0]) is not None:  # a token within the tag
            self.lines.append(f"{name}_END: {name} {json.dumps(before)}")
            return f"{name}_END {self.text(''.join(rest))}"
        self._num += 1
        rule = f"part{self._num}"
        self.lines.append(f"{rule}[suffix={json.dumps(end, ensure_ascii=False)}]: {name}")
        return rule

    def _python(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return a literal of Python; JSON, which is one except for these names."""
        kinds = tool_values.kinds_of(schema, root)
        if kinds == {"boolean"} and not {"enum", "const"} & _resolved(schema, root).keys():
            return '("True" | "False")'
        return '"None"' if kinds == {"null"} else self._json(schema, root)

    def _quoted(self, quote: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        if depth < 0:
            raise ValueError("a schema that refers to itself is not supported in this format")
        schema = _resolved(schema, root)
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            each = [self._quoted(quote, option, root, depth - 1) for option in options]
            return f"({' | '.join(each)})"
        kinds = tool_values.kinds_of(schema, root)
        named = schema.get("type")
        if isinstance(named, list):
            each = [
                self._quoted(quote, {**schema, "type": kind}, root, depth - 1) for kind in named
            ]
            return f"({' | '.join(each)})"
        if kinds == {"string"}:
            return f"{self.text(quote)} {self._string(schema, quote)}"
        if kinds == {"array"}:
            _check(schema, _ARRAY)
            item = self._quoted(quote, schema.get("items", {}), root, depth - 1)
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if most == 0:
                return '"[" "]"'
            left = "" if most is None else most - 1
            items = f'{item} ("," {item}){{{max(0, least - 1)},{left}}}'
            return f'"[" {items if least else f"({items})?"} "]"'
        if kinds == {"object"}:
            _check(schema, _ROOT)
            needed = schema.get("required", ())
            pairs = [
                (self._pair(QuotedArguments(quote), key, each, root), key in needed)
                for key, each in _properties(schema).items()
            ]
            return f'"{{" {self._chain(pairs, ",")} "}}"'
        if "string" in kinds or {"array", "object"} & kinds:
            return f"{self.text(quote)} {self._string({}, quote)}"
        return self._json(schema, root)


def _as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the arguments, with its properties."""
    found = _resolved(schema, schema)
    _check(found, _ROOT)
    return found


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of an object; those that are only required may be anything."""
    named = dict(schema.get("properties", {}))
    return {**named, **{key: {} for key in schema.get("required", ()) if key not in named}}


def _check(schema: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = [key for key in schema if key not in {*known, *_NOTES}]
    if unknown:
        raise ValueError(
            f'"{unknown[0]}" is not supported in the format in which this model writes calls; '
            "leave it out"
        )


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, or the one that it refers to."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = tool_values.target(reference, root)
    if schema is False:
        raise ValueError("a schema that allows nothing is not supported")
    return dict(schema) if isinstance(schema, Mapping) else {}


def _whole(pattern: str) -> str:
    """Return a regex of whole texts in which a pattern is found.

    Raises:
      ValueError: it has an anchor elsewhere than around all of it.
    """
    begins = pattern.startswith("^")
    inner = pattern[1:] if begins else pattern
    ends = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if ends else inner
    # Without what is escaped or within brackets, the innermost ones first.
    bare, left = re.sub(r"\\.|\[(?:[^\]\\]|\\.)*\]", "", inner), ""
    anchored = any(each in bare for each in "^$")
    while bare != left:
        bare, left = re.sub(r"\([^()]*\)", "", bare), bare
    if anchored or ("|" in bare and (begins or ends)):
        raise ValueError(
            f"the pattern {json.dumps(pattern)} has anchors within it, which is not supported in "
            "the format in which this model writes calls; put ^( before it and )$ after it"
        )
    inner = inner.replace("/", "\\/")
    return f"/{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}/"
