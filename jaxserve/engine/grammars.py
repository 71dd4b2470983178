"""Grammars, compiled by llguidance on their own threads, within bounds, and kept by their text."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, final

import numpy as np

from jaxserve.core.constraint import Constraint
from jaxserve.core.errors import GrammarTooComplexError, InvalidGrammarError, MissingExtraError
from jaxserve.engine.matcher import Matcher, first_line
from jaxserve.engine.vocabulary import read_vocabulary
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.scheduling.plan import TokenMasks

# Seconds that a compilation may take; a request that waits for longer is refused.
TIMEOUT_S = 10.0
# Compiled grammars that are kept.
MAX_KEPT = 128
# llguidance's own bounds, which keep one grammar at about a hundred megabytes. Its lexer takes 1 to
# 2 kB a state; the bounds of a mask's time are its defaults.
_LIMITS = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "initial_lexer_fuel": 2_000_000,
    "verbose_errors": False,
}
# Words of llguidance's messages about its bounds.
_BOUND_WORDS = (
    *("fuel", "limit", "too large", "too many", "too complex", "exceed", "too big", "panic"),
    "max is",
)
# JSON as Python's `json.dumps` writes it. A schema's own "x-guidance" comes first.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def has_grammars() -> bool:
    """Return whether the package that compiles grammars is installed."""
    return find_spec("llguidance") is not None


def llguidance() -> Any:
    """Return the package.

    Raises:
      MissingExtraError: it is not installed.
    """
    try:
        importlib.import_module("llguidance.numpy")
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured", "structured output") from error


@final
class Grammars:
    """The compiled grammars of one model, shared by its engines and the threads that submit.

    Args:
      eos_token_ids: tokens that end an answer, where its grammar allows it.
      vocab_size: of the model.
      timeout_s: see `TIMEOUT_S`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        *,
        timeout_s: float = TIMEOUT_S,
    ):
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, Future[Any]] = OrderedDict()
        self._vocabulary: Future[Any] | None = None
        self._compiling = ThreadPoolExecutor(2, "jaxserve-grammar")
        self._masking = ThreadPoolExecutor(2, "jaxserve-mask")
        self._parallel: Any = None

    def check(self, constraint: Constraint) -> None:
        """Compile a grammar, unless that was done before.

        Raises:
          InvalidGrammarError: it cannot be compiled.
          GrammarTooComplexError: it takes more time or memory than is allowed.
          MissingExtraError: llguidance is not installed.
        """
        self._template(constraint)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a matcher for one answer; raises as `check` does."""
        return Matcher(self._template(constraint).deep_copy())

    def masks(self, rows: tuple[int, ...], matchers: Sequence[Matcher]) -> TokenMasks:
        """Begin to compute masks on other threads, one for each row.

        No matcher may be used before the masks are complete.
        """
        return TokenMasks.begin(rows, lambda: self._masks(matchers), self._masking)

    def close(self) -> None:
        """Stop the threads when what they compute is complete."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)

    def _masks(self, matchers: Sequence[Matcher]) -> np.ndarray:
        begin_s = time.perf_counter()
        package = llguidance()
        assert self._vocabulary is not None, "a matcher without a vocabulary"
        size = self._vocabulary.result().vocab_size
        words = package.numpy.allocate_token_bitmask(len(matchers), size)
        pairs = [(matcher.inner, i) for i, matcher in enumerate(matchers)]
        package.numpy.fill_next_token_bitmask_par(self._parallel, pairs, words)
        seconds = (time.perf_counter() - begin_s) / len(matchers)
        for i, matcher in enumerate(matchers):
            if not matcher.has_mask(seconds):
                words[i] = -1
        return words.view(np.uint32)[:, : -(-self._vocab_size // 32)]

    # ---- compilation ----

    def _template(self, constraint: Constraint) -> Any:
        llguidance()  # without it, an error that says what to install
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._compiling.submit(self._read_vocabulary)
            compiled = self._compiled.get(constraint)
            if compiled is None:
                compiled = self._compiling.submit(self._compile, constraint, self._vocabulary)
                self._compiled[constraint] = compiled
                if len(self._compiled) > MAX_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(constraint)
            vocabulary = self._vocabulary
        vocabulary.result()
        try:
            return compiled.result(self._timeout_s)
        except TimeoutError:
            raise GrammarTooComplexError(
                f"the {constraint.notation} was not compiled after {self._timeout_s:g} s; pass a "
                "smaller one, with fewer alternatives and smaller numbers of repetitions"
            ) from None

    def _read_vocabulary(self) -> Any:
        package = llguidance()
        self._parallel = package.LLExecutor()
        return read_vocabulary(package, self._tokenizer, self._eos_token_ids, self._vocab_size)

    def _compile(self, constraint: Constraint, vocabulary: Future[Any]) -> Any:
        package = llguidance()
        matcher = package.LLMatcher
        try:
            grammar = _grammar(constraint, package)
        except ValueError as error:
            raise _invalid(constraint, str(error)) from error
        limits = package.LLParserLimits(**_LIMITS)
        compiled = matcher(vocabulary.result(), grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise _invalid(constraint, compiled.get_error())
        first = compiled.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise _invalid(constraint, first.get_error())
        return compiled


def _grammar(constraint: Constraint, package: Any) -> str:
    """Return a constraint in llguidance's own notation.

    Raises:
      ValueError: it is not in its notation.
    """
    text = constraint.text
    if constraint.notation == "json_schema":
        schema = json.loads(text)
        if isinstance(schema, bool):  # options can be set in an object only
            schema = {} if schema else {"enum": []}
        return package.LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE)
    return package.grammar_from(constraint.notation, text)


def _invalid(constraint: Constraint, message: str) -> InvalidGrammarError:
    message = first_line(message)
    if any(word in message.lower() for word in _BOUND_WORDS):
        return GrammarTooComplexError(
            f"the {constraint.notation} needs more time or memory than is allowed: {message}; pass "
            "a smaller one, with fewer alternatives and smaller numbers of repetitions"
        )
    return InvalidGrammarError(f"the {constraint.notation} cannot be compiled: {message}")
