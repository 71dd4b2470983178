"""Values of arguments that a model writes as plain text or as Python, as JSON."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMES = {"True": "true", "False": "false", "None": "null"}
_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
EVERY_KIND = frozenset(_KINDS.values())
_MAX_REFERENCES = 16


def quoted(text: str) -> str:
    """Return a text as JSON, with half of a surrogate pair as its escape."""
    return escaped(json.dumps(text, ensure_ascii=False))


def escaped(text: str) -> str:
    """Return JSON that can be encoded: half of a surrogate pair in it becomes its escape."""
    return _SURROGATE.sub(lambda each: f"\\u{ord(each[0]):04x}", text)


def literal(text: str) -> str:
    """Return a JSON literal as it is written; any other text, NaN and 1e999 too, as a string."""
    return text if _parsed(text) is not None else quoted(text)


def of_kinds(text: str, kinds: frozenset[str]) -> str:
    """Return plain text as JSON of one of the kinds; as a string if it is not written as one."""
    text_kinds = kinds - {"string"}
    if text_kinds:
        bare = text.strip()
        bare = _NAMES.get(bare, bare)
        # Chat templates that write lists by their `string` filter write them as Python does.
        found = _parsed(bare) or (_python(bare) if bare[:1] in tuple("[{") else None)
        if found is not None and _is_of(found[0], text_kinds):
            return found[1]
    return quoted(text)


def of_python(text: str, kinds: frozenset[str]) -> str:
    """Return a literal of Python, or of JSON, as JSON; any other text as a string.

    Some chat templates put every value between quotes and escape nothing: a quoted text is read as
    another type where the schema has no string, and one that Python cannot parse lacks only its
    quotes.
    """
    bare = _NAMES.get(text.strip(), text.strip())
    found = _parsed(bare) or _python(bare)
    if found is None:
        has_quotes = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in ("'", '"')
        return of_kinds(bare[1:-1] if has_quotes else bare, kinds if has_quotes else frozenset())
    is_text = isinstance(found[0], str) and "string" not in kinds
    return of_kinds(found[0], kinds) if is_text else found[1]


def is_json(text: str) -> bool:
    return _parsed(text) is not None


def text_of(string: str) -> str | None:
    """Return the text of a JSON string; None if it is not one, or cannot be encoded."""
    try:
        text = json.loads(string)
        text.encode()
    except ValueError:
        return None
    return text


def arguments_of(value: str | None) -> str:
    """Return the arguments that a JSON value stands for: an object, text with one, or nothing."""
    if value is None or value == "null":
        return "{}"
    return escaped(json.loads(value)) if value.startswith('"') else value


def property_of(schema: Any, key: str) -> Any:
    """Return the schema of one property; an empty one if it is not found."""
    root = schema
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = target(reference, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key, {}) if isinstance(properties, Mapping) else {}


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows: all of them if it does not say.

    `root` has the definitions. A schema without a type that can be found allows every type.
    """
    found = _kinds(schema, root, _MAX_REFERENCES)
    return found | {"integer"} if "number" in found else found


def _kinds(schema: Any, root: Mapping[str, Any], most: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or most < 0:
        return EVERY_KIND
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _kinds(target(reference, root), root, most - 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(map(str, named))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(_KINDS[type(each)] for each in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return frozenset().union(*(_kinds(each, root, most - 1) for each in schema[key]))
    if isinstance(schema.get("allOf"), list):
        found = EVERY_KIND
        for each in schema["allOf"]:
            found &= _kinds(each, root, most - 1)
        return found
    return EVERY_KIND


def target(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _is_of(value: Any, kinds: frozenset[str]) -> bool:
    kind = _KINDS[type(value)]
    is_whole = kind == "number" and value == int(value)
    return kind in kinds or (is_whole and "integer" in kinds)


def _parsed(text: str) -> tuple[Any, str] | None:
    """Return the value of a JSON text, and the text; None if it is not JSON that can be sent."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite), text
    except (ValueError, RecursionError):
        return None


def _python(text: str) -> tuple[Any, str] | None:
    """Return the value of a literal of Python, and JSON of it; None if there is no such JSON."""
    try:
        value = ast.literal_eval(text)
        # Escapes of JSON in a text of Python leave the halves of surrogate pairs apart.
        written = json.dumps(_joined(value), ensure_ascii=False, allow_nan=False)
        return json.loads(written), escaped(written)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _joined(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, (list, tuple)):
        return [_joined(each) for each in value]
    if isinstance(value, dict):
        return {_joined(key): _joined(each) for key, each in value.items()}
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> float:
    raise ValueError(text)
