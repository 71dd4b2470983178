"""Random JSON schemas with short answers, and grammars that explode."""

from __future__ import annotations

import random
from typing import Any

# Each rule is twice the next one, and the last one is ambiguous.
_RULES = [f"{chr(97 + i)}: {chr(98 + i)} {chr(98 + i)}" for i in range(24)]
DOUBLING = "\n".join(["start: a", *_RULES, 'y: "q" | y y'])
# Thousands of rules of a thousand symbols each.
SYMBOLS = "start: " + " | ".join(f"r{i}" for i in range(3500)) + "\n"
SYMBOLS += "\n".join(f'r{i}: "a"{{1,1000}}' for i in range(3500))

_NAMES = ("a", "b", "id", "name", "x1", "unit")
_WORDS = ("yes", "no", "red", "green", "7", "")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema whose shortest instances have a few dozen characters at most."""
    kinds = [_string, _enum, _integer, _number, _constant, _boolean]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    kind = rng.choice(["length", "pattern", "format"])
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2}$", "^\\d+-x$", "^(ab|c)+$"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    least = rng.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(4)}


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    return {"enum": rng.sample([*_WORDS, 1, 2.5, None, True, [1, 2], {"k": "v"}], 3)}


def _constant(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice([*_WORDS, 12, None])}


def _boolean(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randint(-120, 120)
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": least + 50}
    return {**schema, "multipleOf": 5} if rng.random() < 0.3 else schema


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randint(-20, 20)
    return {"type": "number", "exclusiveMinimum": least, "maximum": least + 3.5}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
