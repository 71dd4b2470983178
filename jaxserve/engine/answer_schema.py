"""A last look at whole answers, by a validator that is not the library that made their grammar."""

from __future__ import annotations

import importlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from jaxserve.core.errors import MissingExtraError

_log = logging.getLogger(__name__)

# Keywords that are evaluated for one answer, of a few microseconds each.
_MAX_EVALUATIONS = 10_000
# Formats that jsonschema knows without another package.
_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
_PATTERNS = ("pattern", "patternProperties")
# Keywords that depend on which names match patterns.
_OTHERS = ("additionalProperties", "unevaluatedProperties")
# Digits up to which Python reads a number in a short time.
_MAX_DIGITS = 4_000
_MAX_MESSAGE = 200


@final
class AnswerSchema:
    """A JSON schema that a finished answer is validated against, by the package jsonschema.

    Regular expressions are left to the grammar: Python's have another syntax, and some would take
    minutes. So are answers that take too long, and those of a schema that asks for leniency.

    Args:
      schema: which has compiled to a grammar.

    Raises:
      MissingExtraError: jsonschema is not installed.
    """

    def __init__(self, schema: Any):
        try:
            jsonschema: Any = importlib.import_module("jsonschema")
            registry = importlib.import_module("referencing").Registry()
        except ImportError as error:
            raise MissingExtraError("jsonschema", "structured", "a JSON schema") from error
        draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        keywords = {name: self._counted(name, check) for name, check in draft.VALIDATORS.items()}
        made = jsonschema.validators.extend(draft, keywords)
        formats = jsonschema.FormatChecker(_FORMATS)
        options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
        self._is_lenient = bool(options.get("lenient") or options.get("coerce_one_of"))
        self._validator = made(schema, registry=registry, format_checker=formats)
        self._num_left = 0
        self._lock = threading.Lock()

    def problem(self, answer: str) -> str | None:
        """Return why a whole answer is not an instance; None if it is one, or nothing tells."""
        if self._is_lenient:
            return None
        with self._lock:  # engines share grammars
            return self._found(answer)

    def _found(self, answer: str) -> str | None:
        self._num_left = _MAX_EVALUATIONS
        try:
            found = next(self._validator.iter_errors(json.loads(answer, parse_int=_whole)), None)
        except json.JSONDecodeError as error:
            return f"it is not JSON: {error}"
        except Exception as error:  # deep or long ones, or references with a meaning of their own
            _log.info("an answer was not validated against its schema: %r", error)
            return None
        return None if found is None else f"{found.json_path}: {found.message[:_MAX_MESSAGE]}"

    def _counted(self, name: str, check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        """Return the check of a keyword, with a bound on how often it is made."""

        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            self._num_left -= 1
            if self._num_left < 0:
                raise TimeoutError("it takes too long")
            if name in _PATTERNS or (name in _OTHERS and "patternProperties" in schema):
                return
            yield from check(validator, value, instance, schema) or ()

        return counted


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise OverflowError("a number has too many digits")
    return int(digits)
