"""Schemas that llguidance would not enforce as they stand, against jsonschema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest

from jaxserve.core.json_schema import lark_rules
from tests.common.matching import matching as matching_lark

pytestmark = pytest.mark.fast

# What a double does not hold; llguidance 1.9.1 makes 9007199254740992 of it.
ID = 2**53 + 1
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


def matching(schema: Any, texts: Iterable[str]) -> list[str]:
    """Return the texts, in `json.dumps`'s style, that are whole answers for a schema."""
    return matching_lark("\n".join(lark_rules(schema, "start")), texts)


def is_valid(schema: Any, text: str) -> bool:
    """Return what jsonschema says of it."""
    draft = jsonschema.Draft202012Validator
    return draft(schema, format_checker=draft.FORMAT_CHECKER).is_valid(json.loads(text))


def _record(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"id": value, "name": {"type": "string"}}}


# Schemas, and texts that llguidance 1.9.1 alone takes or refuses wrongly, beside others.
CASES: list[tuple[Any, list[str]]] = [
    ({"const": ID}, [str(ID), str(ID - 1), str(ID + 1)]),
    ({"enum": [ID, 1, "x"]}, [str(ID), str(ID - 1), "1", '"x"']),
    ({"const": 2**64}, [str(2**64), str(2**64 + 1)]),
    ({"const": {"a": [ID, 'é/"\\\n']}}, [json.dumps({"a": [ID, 'é/"\\\n']}, ensure_ascii=False)]),
    ({"const": 0.48785665652414756}, ["0.48785665652414756", "0.4878566565241475"]),
    ({"const": 5.607173210286937e-19}, ["5.607173210286937e-19"]),
    ({"type": "integer", "minimum": ID, "maximum": ID}, [str(ID), str(ID - 1), str(ID + 1)]),
    ({"type": "integer", "exclusiveMinimum": ID}, [str(ID), str(ID + 1), str(10 * ID), "-1"]),
    ({"type": "integer", "exclusiveMaximum": -ID}, [str(-ID), str(-ID - 1), "1", "0"]),
    ({"type": "integer", **INT64}, [str(2**63 - 1), str(2**63), str(-(2**63)), "5", "-0", "1.5"]),
    ({"type": "integer", **INT64}, [str(-(2**63) - 1), "12345678901234567890", "0", "-9"]),
    ({"type": "number", **INT64}, [str(2**63), str(2**63 - 1), "1.5", "-0.25"]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [str(2**64 - 1), str(2**64), "-1"]),
    ({"type": ["integer", "null"], **INT64}, ["null", "5", str(2**63), '"x"']),
    (INT64, ["null", "5", str(2**63), '"x"', "{}", "[1, 2]", '{"a": 1}']),
    ({"type": "number", "maximum": 0.12345678901234568}, ["0.12345678901234568", "0.1235", "-7.5"]),
    ({"type": "number", "minimum": 0.12345678901234568}, ["0.12345678901234566", "0.2", "3", "0"]),
    (
        _record({"type": "integer", **INT64}),
        [
            "{}",
            f'{{"id": {2**63 - 1}, "name": "x"}}',
            f'{{"id": {2**63}}}',
            '{"name": "x"}',
            '{"id": 1, "more": [1, {"a": null}], "most": 2}',
            '{"id": 1, "name": 5}',
            '{"id": 1, "\\u006eame": 5}',
        ],
    ),
    (
        {**_record({"const": ID}), "required": ["id"], "additionalProperties": False},
        ["{}", f'{{"id": {ID}}}', f'{{"id": {ID}, "x": 1}}', f'{{"id": {ID}, "name": "x"}}'],
    ),
    (
        {**_record({"const": ID}), "required": ["id"], "additionalProperties": {"enum": [ID]}},
        [f'{{"id": {ID}}}', f'{{"id": {ID}, "b": {ID}}}', f'{{"id": {ID}, "b": {ID - 1}}}'],
    ),
    (
        {"type": "array", "items": {"enum": [ID]}, "minItems": 1, "maxItems": 2},
        ["[]", f"[{ID}]", f"[{ID}, {ID}]", f"[{ID}, {ID}, {ID}]", f"[{ID - 1}]"],
    ),
    (
        {"type": "array", "prefixItems": [{"const": ID}, {"type": "string"}], "items": False},
        ["[]", f"[{ID}]", f'[{ID}, "x"]', f'[{ID}, "x", 1]', '["x"]'],
    ),
    (
        {"type": "array", "prefixItems": [{"const": ID}], "items": {"type": "null"}, "minItems": 2},
        [f"[{ID}]", f"[{ID}, null]", f"[{ID}, null, null]", f"[{ID}, 1]"],
    ),
    (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "id": {"const": ID},
                        "text": {"$ref": "#/$defs/text"},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["id"],
                    "additionalProperties": False,
                },
                "text": {"type": "string", "maxLength": 2},
            },
        },
        [
            f'{{"id": {ID}, "text": "ab", "next": {{"id": {ID}, "next": null}}}}',
            f'{{"id": {ID}, "next": {{"id": {ID - 1}}}}}',
            f'{{"id": {ID}, "text": "abc"}}',
        ],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "string"}}},
        ['{"\\u0061": 5}', '{"a": "x"}', '{"b": 5}', '{"A": 5, "b": "\\n"}'],
    ),
    (
        {"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": {"type": "null"}},
        ['{"\\u0061": null}', '{"a": "x"}', '{"b": null}'],
    ),
    ({"type": "object", "minProperties": 1}, ["{}", '{"a": 1}', '{"a": 1, "b": 2}']),
    ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, ["[null, null]"]),
]
CASES += [
    ({"type": "string", "format": "date"}, [f'"{day}"'])
    for day in (
        *("2023-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "0004-02-29", "2100-02-29"),
        *("0000-01-01", "2023-04-31", "2023-12-31", "2023-00-10", "9999-02-28"),
    )
]
CASES.append(
    ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-02-29"', '"1999-01-01"'])
)


@pytest.mark.parametrize(("schema", "texts"), CASES, ids=[json.dumps(s)[:50] for s, _ in CASES])
def test_answers_are_those_that_validate(schema: Any, texts: list[str]):
    """What may be written is what jsonschema 4.26.0 takes; llguidance 1.9.1 alone differs."""
    assert matching(schema, texts) == [text for text in texts if is_valid(schema, text)]


def test_random_bounds():
    """Of 40 random ranges beyond 2^53, integers around both ends match as Python compares them."""
    rng = random.Random(0)
    for _ in range(40):
        low, high = sorted(rng.randrange(-(2 ** rng.randrange(54, 70)), 2**66) for _ in range(2))
        schema = {"type": "integer", "minimum": low, "maximum": high}
        near = [end + step for end in (low, high) for step in (-1, 0, 1)]
        numbers = [*near, rng.randint(low, high), low // 10, high * 10, 0]
        right = [str(number) for number in numbers if low <= number <= high]
        assert matching(schema, map(str, numbers)) == right, (low, high)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "minProperties": 2}, '"minProperties": 2'),
        ({**_record({}), "minProperties": 4}, '"minProperties": 4'),
        ({"oneOf": [{"const": ID}, {"type": "null"}]}, '"oneOf"'),
        ({"type": "integer", "minimum": ID, "multipleOf": 2}, '"multipleOf"'),
        ({"allOf": [{"const": ID}, {"type": "integer"}]}, '"allOf"'),
        ({"not": {"const": ID}}, '"not"'),
        ({"patternProperties": {"a": {"const": ID}}, "type": "object"}, '"patternProperties"'),
        ({"const": float("inf")}, "inf"),
        ({"properties": {"a\u0001": {}}}, r'"a\u0001" needs an escape'),
        ({"const": ID, "x-guidance": {"whitespace_flexible": True}}, "x-guidance"),
    ],
)
def test_others_are_refused_by_name(schema: Any, said: str):
    """What can neither be enforced nor rewritten is an error that names the keyword."""
    with pytest.raises(ValueError) as raised:
        lark_rules(schema, "start")
    assert said in str(raised.value)


def test_other_schemas_stay_one_rule():
    """A schema that llguidance holds is given to it as it is."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**53}}}
    assert len(lark_rules(schema, "start")) == 1
    assert len(lark_rules({"type": "number", "minimum": 0.1}, "start")) == 1
    assert matching({"const": "a\u0001"}, ['"a\\u0001"'])
    closed = {"type": "object", "properties": {"a\u0001": {}}, "additionalProperties": False}
    assert matching(closed, ['{"a\\u0001": 1}'])
