"""The validation of whole answers, by jsonschema 4.26.0."""

from __future__ import annotations

import time

import pytest

from jaxserve.engine.grammars import AnswerSchema

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("schema", "answer", "said"),
    [
        ({"type": "integer", "maximum": 5}, "5", None),
        ({"type": "integer", "maximum": 5}, "6", "$: 6 is greater than the maximum of 5"),
        ({"const": 2**53 + 1}, "9007199254740992", "$: 9007199254740993 was expected"),
        ({"minProperties": 2}, '{"a": 1, "a": 2}', "does not have enough properties"),
        ({"properties": {"d": {"format": "date"}}}, '{"d": "2023-02-29"}', "$.d: "),
        ({"type": "object"}, '{"a": 1', "it is not JSON"),
        ({"additionalProperties": False}, '{"a": 1}', "unexpected"),
        (False, "1", "does not allow"),
        (True, "1", None),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}]},
            "[2]",
            "1",
        ),
        ({"x-guidance": {"lenient": True}, "type": "integer"}, '"x"', None),
    ],
)
def test_answers_are_validated(schema: object, answer: str, said: str | None):
    """A problem says where and what; lenient schemas have none."""
    problem = AnswerSchema(schema).problem(answer)
    assert problem is None if said is None else said in str(problem)


def test_what_cannot_be_told_passes():
    """Regular expressions are left to the grammar; long, deep and referring ones are bounded."""
    slow = {"pattern": "^(x+)+$", "type": "string"}
    assert AnswerSchema(slow).problem('"' + "x" * 40 + '!"') is None
    names = {"patternProperties": {"^(x+)+$": {}}, "additionalProperties": False}
    assert AnswerSchema(names).problem('{"' + "x" * 40 + '!": 1}') is None
    twice = {"type": "array", "items": {"$ref": "#"}}
    many = AnswerSchema({"anyOf": [{**twice, "minItems": 2}, twice]})
    begin_s = time.thread_time()
    assert many.problem("[" * 40 + "]" * 40) is None
    assert time.thread_time() - begin_s < 5
    assert AnswerSchema({"type": "integer"}).problem("9" * 5000) is None
    assert AnswerSchema({"$ref": "https://example.com/schema"}).problem("1") is None
    assert AnswerSchema({"items": {"$ref": "#"}}).problem("[" * 3000 + "]" * 3000) is None
