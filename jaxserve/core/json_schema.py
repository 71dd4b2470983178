"""JSON schemas in a form that llguidance can enforce: rewritten, partly as rules, or refused.

llguidance 1.9.1 holds every number as a double, counts a repeated key of an object each time, has
no calendar, and accepts a key that a schema does not name in escapes, even if it spells one that
the schema names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any, final

# JSON as Python's `json.dumps` writes it. A schema's own "x-guidance" comes first.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Without \u, because any key could be spelled with it.
_ESCAPES = 'nrbtf\\"'
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")

_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not", "contains", "if", "then")
_SCHEMAS += ("else", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("items", "prefixItems", "anyOf", "allOf", "oneOf")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly"))
_NOTES |= {"writeOnly", "$comment", "$schema", "$id", "$defs", "definitions", "x-guidance"}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Keywords that rules are written for, by type, and those that only apply to strings.
_NUMBER = frozenset((*BOUNDS, "multipleOf"))
_OBJECT = frozenset(("properties", "required", "additionalProperties"))
_ARRAY = frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems"))
_STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
_TYPES = ("null", "boolean", "number", "string", "array", "object")

# Year 0 is not in Python's calendar.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
CALENDAR = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[tT]"}


def lark_rules(schema: Any, name: str) -> list[str]:
    """Return rules in llguidance's Lark, of which `name` matches the instances of a schema.

    Usually it is one rule with the schema itself. Objects, lists and alternatives around numbers
    that a double does not hold are written as rules, and the numbers as digits.

    Raises:
      ValueError: invalid instances would match, and it cannot be rewritten.
    """
    return _Rules(_enforceable(schema), name).lines


def _enforceable(schema: Any) -> dict[str, Any]:
    """Return a schema that llguidance enforces, except for numbers that it does not hold."""
    if isinstance(schema, bool):  # options can be set in an object only
        schema = {} if schema else {"enum": []}
    given = schema.get("x-guidance") or {}
    schema = _mapped(schema, _rewritten)
    style: dict[str, Any] = dict(JSON_STYLE)
    if any(_has_open_names(each) for each in _parts(schema)):
        style["json_allowed_escapes"] = _ESCAPES
        if "json_allowed_escapes" not in given:
            _check_writable(schema)
    return {**schema, "x-guidance": {**style, **given}}


def _rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return one schema in llguidance's form; schemas within it are rewritten separately."""
    schema = dict(schema)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    pattern = CALENDAR.get(str(schema.get("format")))
    if pattern is not None and "pattern" not in schema:
        schema["pattern"] = pattern
    elif pattern is not None:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
    named = {*schema.get("properties", ()), *schema.get("required", ())}
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > 1 + len(named) and _is_open(schema):
        raise ValueError(
            f'"minProperties": {least} is not supported where more than one property has no name '
            "of its own, since the same key could be written twice; name the properties in "
            '"properties", or leave it out'
        )
    return schema


def _is_open(schema: Mapping[str, Any]) -> bool:
    is_closed = schema.get("additionalProperties") is False
    return not is_closed or bool(schema.get("patternProperties"))


def _has_open_names(schema: Mapping[str, Any]) -> bool:
    """Return whether an object may have keys that the schema neither names nor matches."""
    names = ("properties", "patternProperties", "required")
    return _is_open(schema) and any(map(schema.get, names))


def _check_writable(schema: Any) -> None:
    """Raise ValueError if a constant or a name needs an escape that keys could use too."""
    texts = [text for part in _parts(schema) for text in _texts(part)]
    found = next((text for text in texts if _UNWRITABLE.search(text)), None)
    if found is not None:
        raise ValueError(
            f"{json.dumps(found)} needs an escape, and in escapes an additional property could "
            'spell the name of another one; set "additionalProperties": false'
        )


def _texts(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that instances must contain."""
    yield from schema.get("properties", ())
    yield from schema.get("required", ())
    data = [*schema.get("enum", ()), schema.get("const")]
    while data:
        each = data.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            data += [*each, *each.values()]
        elif isinstance(each, list):
            data += each


# ---- rules ----


@final
class _Rules:
    """The rules of one schema; `lines` begins with that of `name`."""

    def __init__(self, root: dict[str, Any], name: str):
        self.lines: list[str] = []
        self._root = root
        self._name = name
        self._num = 0
        self._of_references: dict[str, str] = {}
        if not self._is_held(root) and any(
            root["x-guidance"].get(key) != value for key, value in JSON_STYLE.items()
        ):
            raise ValueError(
                'with a number that a double does not hold, the "x-guidance" of white space is '
                "not supported; leave it out"
            )
        body = self._body(root)
        self.lines.insert(0, f"{name}: {body}")

    def _is_held(self, schema: Any) -> bool:
        """Return whether llguidance holds every number in a schema and its references."""
        seen, left = set[str](), [schema]
        while left:
            for part in _parts(left.pop(), definitions=False):
                keys = ("const", "enum", *BOUNDS)
                if not all(is_held(part[key]) for key in keys if key in part):
                    return False
                reference = part.get("$ref")
                if isinstance(reference, str) and reference not in seen:
                    seen.add(reference)
                    left.append(self._found(reference))
        return True

    def _found(self, reference: str) -> Any:
        """Return the target of a reference within the schema; {} for any other."""
        found: Any = self._root
        if not reference.startswith("#"):
            return {}
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or step not in found:
                return {}
            found = found[step]
        return found

    def _body(self, schema: Any) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if self._is_held(schema):
            return f"%json {json.dumps(self._whole(schema))}"
        for key, rules in (
            ("$ref", self._reference),
            ("const", self._constants),
            ("enum", self._constants),
            ("anyOf", self._alternatives),
            ("allOf", self._single),
        ):
            if key in schema:
                return rules(schema, key)
        types = schema.get("type", _TYPES)
        if not isinstance(types, str):
            return " | ".join(self._rule({**schema, "type": each}) for each in types)
        if types in ("integer", "number"):
            self._check(schema, _NUMBER | _OBJECT | _ARRAY | _STRING)
            return self._terminal(decimals_within(schema, is_whole=types == "integer"))
        if types == "object":
            return self._object(schema)
        if types == "array":
            return self._array(schema)
        rest = {key: value for key, value in schema.items() if key not in BOUNDS}
        if not self._is_held(rest):
            self._check(rest, _STRING)
        return self._body(rest)

    def _whole(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a part of the schema as a schema of its own, with the definitions."""
        if schema is self._root:
            return dict(schema)
        refers = [part["$ref"] for part in _parts(schema) if "$ref" in part]
        for reference in refers:
            if not str(reference).startswith(("#/$defs/", "#/definitions/")):
                raise ValueError(
                    f'"$ref": {json.dumps(reference)} is not supported in a schema with a number '
                    'that a double does not hold; refer to "$defs"'
                )
        shared = ("x-guidance", *(("$defs", "definitions") if refers else ()))
        return {**schema, **{key: self._root[key] for key in shared if key in self._root}}

    def _rule(self, schema: Any) -> str:
        """Write a new rule for a schema; return its name."""
        name = self._new()
        self.lines.append(f"{name}: {self._body(schema)}")
        return name

    def _terminal(self, body: str) -> str:
        name = self._new().upper()
        self.lines.append(f"{name}: {body}")
        return name

    def _new(self) -> str:
        self._num += 1
        return f"{self._name}_{self._num}"

    def _check(self, schema: Mapping[str, Any], known: Collection[str]) -> None:
        unknown = [key for key in schema if key not in {"type", *known, *_NOTES}]
        if unknown:
            raise ValueError(
                f'"{unknown[0]}" is not supported beside a number that a double does not hold; '
                "use integers up to 2**53 and numbers of 15 digits, or leave it out"
            )

    def _reference(self, schema: Mapping[str, Any], _: str) -> str:
        self._check(schema, {"$ref"})
        reference = schema["$ref"]
        if reference not in self._of_references:
            name = self._of_references[reference] = self._new()
            self.lines.append(f"{name}: {self._body(self._found(reference))}")
        return self._of_references[reference]

    def _constants(self, schema: Mapping[str, Any], key: str) -> str:
        self._check(schema, {key})
        types = schema.get("type", _TYPES)
        types = (types,) if isinstance(types, str) else types
        values = [schema["const"]] if key == "const" else schema["enum"]
        texts = [json.dumps(v, ensure_ascii=False) for v in values if _is_of(v, types)]
        if not texts:
            raise ValueError(f'no value of "{key}" is of the "type"')
        return self._terminal(" | ".join(map(_quoted, dict.fromkeys(texts))))

    def _alternatives(self, schema: Mapping[str, Any], _: str) -> str:
        self._check(schema, {"anyOf"})
        return " | ".join(map(self._rule, schema["anyOf"]))

    def _single(self, schema: Mapping[str, Any], _: str) -> str:
        self._check(schema, {"allOf"})
        if len(schema["allOf"]) > 1:
            self._check(schema, ())
        return self._rule(schema["allOf"][0])

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Write a chain of rules: named properties in order, then other keys."""
        self._check(schema, _OBJECT | _ARRAY | _STRING | _NUMBER)
        others = schema.get("additionalProperties", True)
        required = schema.get("required", ())
        named = {**schema.get("properties", {})}
        named |= {name: others for name in required if name not in named}
        first = more = ""
        if others is not False:
            keys = " | ".join(_quoted(json.dumps(name, ensure_ascii=False)) for name in named)
            key = self._terminal(
                r'/"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/' + (f" & ~({keys})" if keys else "")
            )
            pair = self._new()
            self.lines.append(f'{pair}: {key} ": " {self._rule(others)}')
            first, more = self._new(), self._new()
            self.lines.append(f'{more}: (", " {pair})*')
            self.lines.append(f"{first}: ({pair} {more})?")
        for name in reversed(named):
            if named[name] is False and name not in required:
                continue
            pair = self._new()
            key = _quoted(json.dumps(name, ensure_ascii=False) + ": ")
            self.lines.append(f"{pair}: {key} {self._rule(named[name])}")
            with_it = f"{pair} {more}"
            if name in required:
                first, more = self._both(with_it, f'", " {with_it}')
            else:
                begin = f"{with_it} | {first}" if first else f"({with_it})?"
                first, more = self._both(begin, f'(", " {pair})? {more}')
        return f'"{{" {first} "}}"'

    def _both(self, begin: str, more: str) -> tuple[str, str]:
        """Return the names of rules for the beginning of an object, and for what follows in it."""
        names = self._new(), self._new()
        self.lines += [f"{names[0]}: {begin}", f"{names[1]}: {more}"]
        return names

    def _array(self, schema: Mapping[str, Any]) -> str:
        """Write what follows each item of the prefix, the last one first."""
        self._check(schema, _OBJECT | _ARRAY | _STRING | _NUMBER)
        prefix, items = schema.get("prefixItems", ()), schema.get("items", True)
        if isinstance(items, list):  # of drafts before 2020-12
            prefix, items = items, schema.get("additionalItems", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        num = len(prefix) if most is None else min(len(prefix), most)
        tail = ""
        if items is not False and (most is None or most > num):
            left = "" if most is None else str(most - num)
            item = self._rule(items)
            tail = f'(", " {item}){{{max(0, least - num)},{left}}}'
            if not num:
                left = "" if most is None else str(most - 1)
                tail = f'{item} (", " {item}){{{max(0, least - 1)},{left}}}'
                tail = tail if least else f"({tail})?"
        for i in reversed(range(num)):
            comma = '", " ' if i else ""
            tail = f"{comma}{self._rule(prefix[i])} {tail}"
            tail = tail if i < least else f"({tail})?"
        return f'"[" {tail} "]"'


def _is_of(value: Any, types: Any) -> bool:
    """Return whether a value is of one of the types of JSON schema; 1.0 is an integer."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        return "number" in types or ("integer" in types and value == int(value))
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)] in types


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema in which every schema is changed, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key, value in schema.items():
        if key in _MAPPINGS and isinstance(value, dict):
            new[key] = {name: _mapped(each, change) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            new[key] = [_mapped(each, change) for each in value]
        elif key in _SCHEMAS:
            new[key] = _mapped(value, change)
    return change(new)


def _parts(schema: Any, *, definitions: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a schema and all within it; those of its definitions only with `definitions`."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if not definitions and key in ("$defs", "definitions"):
            continue
        if key in _MAPPINGS and isinstance(value, dict):
            inner = list(value.values())
        elif key in _LISTS and isinstance(value, list):
            inner = value
        else:
            inner = [value] if key in _SCHEMAS else []
        for each in inner:
            yield from _parts(each, definitions=definitions)


def is_held(value: Any) -> bool:
    """Return whether llguidance reads a constant or a bound as exactly that number.

    A double holds integers up to 2^53. Its parser makes other numbers of a whole one and a power of
    ten, and is exact if a double holds both.
    """
    if isinstance(value, Mapping):
        return all(map(is_held, value.values()))
    if isinstance(value, list):
        return all(map(is_held, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a number that a double does not hold, {value!r}, cannot be written")
    _, digits, power = Decimal(repr(value)).normalize().as_tuple()
    whole = int("".join(map(str, digits)))
    return whole <= 2**53 and abs(value) <= 2**53 and isinstance(power, int) and power >= -22


def decimals_within(schema: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return a terminal of the decimals within the bounds of a schema."""
    if "multipleOf" in schema:
        raise ValueError(
            '"multipleOf" is not supported beside a bound that a double does not hold; leave one '
            "of them out"
        )
    bounds = {key: schema[key] for key in BOUNDS if key in schema}
    parts = []
    for key, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f'"{key}": {json.dumps(value)} is not a number')
        bound, is_strict = Decimal(repr(value)), key.startswith("exclusive")
        # An upper bound is a lower bound of the negative number.
        is_above = key.lower().endswith("maximum")
        parts.append(_beyond(-bound if is_above else bound, is_strict, is_above))
    if is_whole:
        parts.append("-?(?:0|[1-9][0-9]*)")
    elif any(abs(value) > 2**53 for value in bounds.values()):
        # A larger number with a fraction is rounded to a double, which could exceed the bound.
        parts.append(r"-?(?:0|[1-9][0-9]*|(?:0|[1-9][0-9]{0,14})\.[0-9]+)")
    return " & ".join(f"/{part}/" for part in parts)


def _beyond(bound: Decimal, is_strict: bool, is_mirrored: bool) -> str:
    """Return a regex of decimals from a bound on; with `is_mirrored`, of their negatives."""
    own, other = ("-", "") if is_mirrored else ("", "-")
    if bound > 0 or (bound == 0 and is_strict):
        return own + _larger(bound, is_strict)
    return f"{own}{_larger(Decimal(0), False)}|{other}{_smaller(-bound, is_strict)}"


def _split(bound: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{bound:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _larger(bound: Decimal, is_strict: bool) -> str:
    """Return a regex of unsigned decimals from a non-negative bound on."""
    whole, fraction = _split(bound)
    same = [f"{fraction[:i]}[{int(c) + 1}-9][0-9]*" for i, c in enumerate(fraction) if c != "9"]
    same.append(f"{fraction}[0-9]*[1-9][0-9]*" if is_strict else f"{fraction}[0-9]*")
    same_whole = rf"{whole}\.(?:{'|'.join(same)})"
    bare = [] if fraction or is_strict else [str(whole)]
    return _any([*bare, same_whole, rf"{_from(whole + 1)}(?:\.[0-9]+)?"])


def _smaller(bound: Decimal, is_strict: bool) -> str:
    """Return a regex of unsigned decimals up to a non-negative bound."""
    whole, fraction = _split(bound)
    found = [rf"{_up_to(whole - 1)}(?:\.[0-9]+)?"] if whole else []
    if fraction or not is_strict:
        found.append(str(whole))
    same = [f"{fraction[:i]}[0-{int(c) - 1}][0-9]*" for i, c in enumerate(fraction) if c != "0"]
    same += [fraction[:i] for i in range(1, len(fraction))]
    if not is_strict:
        same.append(f"{fraction}0*" if fraction else "0+")
    if same:
        found.append(rf"{whole}\.(?:{'|'.join(same)})")
    return _any(found) if found else "[^0-9]"


def _from(least: int) -> str:
    """Return a regex of whole numbers from a positive one on."""
    digits = str(least)
    found = [digits]
    for i, c in enumerate(digits):
        if c != "9":
            found.append(f"{digits[:i]}[{int(c) + 1}-9]" + _count(len(digits) - i - 1))
    return _any([*found, f"[1-9][0-9]{{{len(digits)},}}"])


def _up_to(most: int) -> str:
    digits = str(most)
    found = [digits]
    for i, c in enumerate(digits):
        first = "1" if i == 0 and len(digits) > 1 else "0"
        if c > first:
            found.append(f"{digits[:i]}[{first}-{int(c) - 1}]" + _count(len(digits) - i - 1))
    shorter = len(digits) - 1
    return _any([*found, *(["0", f"[1-9][0-9]{{0,{shorter - 1}}}"] if shorter else [])])


def _count(num_digits: int) -> str:
    return f"[0-9]{{{num_digits}}}" if num_digits else ""


def _any(parts: list[str]) -> str:
    return f"(?:{'|'.join(parts)})"
