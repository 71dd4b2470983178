"""Compiles grammars with llguidance within bounds, first on trial, and caches them by text."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from jaxserve.core.errors import (
    GrammarsBusyError,
    GrammarTooComplexError,
    InvalidGrammarError,
    MissingExtraError,
)
from jaxserve.core.json_schema import lark_rules
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import Constraint
from jaxserve.engine.grammar_compilation import CompileJob, CompileThreads, GrammarTrials, closed
from jaxserve.engine.matcher import Matcher, ThinkingMatcher, first_line
from jaxserve.models.thinking import Thinking
from jaxserve.scheduling.plan import TokenMasks

if TYPE_CHECKING:  # engines, which policies are checked with, load no JAX
    from jaxserve.models.tokenizer import Tokenizer

# The most seconds of processor time that a compilation takes, and the most that a request waits
# for it: on a machine that is busy with other things it may take longer.
MAX_CPU_S, MAX_WAIT_S = 10.0, 60.0
# Maximum number of cached compiled grammars.
MAX_KEPT = 32
# llguidance's own bounds. Its lexer takes 1 to 2 kB a state, so one grammar takes about 50 MB at
# most, and all cached ones 1.6 GB; the bounds of a mask's time are its defaults.
_LIMITS = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 25_000,
    "initial_lexer_fuel": 2_000_000,
    "verbose_errors": False,
}
# Words of llguidance's messages about its bounds.
_BOUND_WORDS = (
    *("fuel", "limit", "too large", "too many", "too complex", "exceed", "too big", "panic"),
    "max is",
)
# A rule of llguidance's with a parameter, of which there may be 2^64, and which no bound ends.
_PARAMETRIC = re.compile(r"\w[ \t]*::[ \t]*_\b")
_log = logging.getLogger(__name__)

# The most evaluated keywords for one answer, of a few microseconds each.
_MAX_EVALUATIONS = 10_000
# Formats that jsonschema knows without another package.
_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
_PATTERNS = ("pattern", "patternProperties")
# Keywords that depend on which names match patterns.
_OTHERS = ("additionalProperties", "unevaluatedProperties")
# The most digits of a number that Python reads in a short time.
_MAX_DIGITS = 4_000
_MAX_MESSAGE = 200


def has_grammars() -> bool:
    return find_spec("llguidance") is not None


def llguidance() -> Any:
    """Return the package; MissingExtraError if it is not installed."""
    try:
        importlib.import_module("llguidance.numpy")
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured", "structured output") from error


@final
@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A compiled grammar, of which every answer gets a copy.

    The copies share the states of llguidance's lexer, and the limit on their number. Whole answers
    are validated against `schema`; it is None for other notations.
    """

    template: Any
    schema: AnswerSchema | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether earlier answers have left no states to a new one."""
        copy = self.template.deep_copy()
        copy.compute_bitmask()
        return copy.is_error()


class _Task(NamedTuple):
    matcher: Matcher | ThinkingMatcher
    given: tuple[Any, ...]


@final
class Grammars:
    """The compiled grammars of one model, shared by its engines and the threads that submit.

    An answer may end with one of `eos_token_ids` if its grammar allows it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        *,
        max_cpu_s: float = MAX_CPU_S,
        max_wait_s: float = MAX_WAIT_S,
    ):
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_cpu_s, self._max_wait_s = max_cpu_s, max_wait_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, CompileJob] = OrderedDict()
        self._vocabulary: Any = None
        self._trials: GrammarTrials | None = None
        self._parallel: Any = None
        self._reading = threading.Lock()
        self._compiling: CompileThreads | None = None
        self._masking = ThreadPoolExecutor(2, "jaxserve-mask")
        self._is_closed = False

    def compiled(self, constraint: Constraint) -> CompiledGrammar:
        """Return a grammar, compiled now unless it is cached. It may wait for a thread.

        Raises:
          InvalidGrammarError: it cannot be compiled.
          GrammarTooComplexError: it takes more time or memory than is allowed.
          GrammarsBusyError: too many others are being compiled, or the machine is too busy.
          MissingExtraError: llguidance is not installed.
          RuntimeClosedError: `close` was called.
        """
        llguidance()  # raises an error that says what to install
        vocabulary = self._read_vocabulary()
        job = self._job(constraint, vocabulary)
        found = self._result(constraint, job)
        if found.is_exhausted:
            self._drop(constraint, job)
            found = self._result(constraint, self._job(constraint, vocabulary))
        return found

    def matcher(self, request: Request) -> Matcher | ThinkingMatcher:
        thinking, skip = request.thinking, request.params.skip_special_tokens
        ends = {*request.stop_token_ids, *self._eos_token_ids}
        inner: Matcher | None = None
        if isinstance(request.grammar, CompiledGrammar):
            # The one that stands for an end if the model has no end token.
            ends.add(self._vocabulary.eos_token)
            template = request.grammar.template.deep_copy()
            inner = Matcher(template, request.params.min_tokens, tuple(ends))
        if not isinstance(thinking, Thinking):
            assert inner is not None, "a request without its grammar"
            return inner
        return ThinkingMatcher(
            inner,
            thinking,
            lambda: self._tokenizer.stream_decoder(skip, shown=thinking.shown),
            request.params.max_thinking_tokens,
            tuple(ends),
        )

    def masks(
        self, rows: tuple[int, ...], matchers: Sequence[Matcher | ThinkingMatcher]
    ) -> TokenMasks:
        """Begin to compute masks on other threads, one for each row, in the order of the matchers.

        A matcher has one row, and one more after each token that it has proposed. If llguidance
        raises, the matchers concerned have an `error` afterwards, and the rest their masks. No
        matcher may be used before the masks are complete.
        """
        return TokenMasks.begin(rows, lambda: self._masks(matchers), self._masking)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._compiling is not None:
                self._compiling.close()
        if self._trials is not None:
            self._trials.close()
        self._masking.shutdown(wait=False, cancel_futures=True)

    def _masks(self, matchers: Sequence[Matcher | ThinkingMatcher]) -> np.ndarray:
        begin_s = time.perf_counter()
        size = self._vocab_size if self._vocabulary is None else self._vocabulary.vocab_size
        starts = [0, *itertools.accumulate(1 + len(matcher.proposed) for matcher in matchers)]
        words = np.full((starts[-1], -(-size // 32)), -1, np.int32)
        # llguidance has a function for matchers with proposals, and another one for those without.
        drafted, others = list[_Task](), list[_Task]()
        for matcher, start in zip(matchers, starts, strict=False):
            inner = matcher.inner
            if inner is None:  # it thinks
                continue
            if matcher.proposed:
                drafted.append(_Task(matcher, (inner, start, list(matcher.proposed))))
            else:
                others.append(_Task(matcher, (inner, start)))
        if drafted or others:
            fill = llguidance().numpy
            self._fill(fill.fill_next_token_bitmask_par_with_draft_tokens, drafted, words)
            self._fill(fill.fill_next_token_bitmask_par, others, words)
        seconds = (time.perf_counter() - begin_s) / len(matchers)
        masks = words.view(np.uint32)
        for matcher, start, end in zip(matchers, starts, starts[1:], strict=False):
            matcher.take_masks(masks[start:end], seconds)
        return masks[:, : -(-self._vocab_size // 32)]

    def _fill(self, function: Any, tasks: Sequence[_Task], words: np.ndarray) -> None:
        """Compute the masks of these tasks. A matcher whose task raises cannot continue."""
        if not tasks:
            return
        try:
            function(self._parallel, [task.given for task in tasks], words)
        except Exception as error:
            if len(tasks) == 1:
                tasks[0].matcher.fail(error)
                return
            # llguidance checks all tasks before it begins, so each can be computed alone.
            for task in tasks:
                self._fill(function, [task], words)

    # ---- compilation ----

    def _read_vocabulary(self) -> Any:
        """Return llguidance's view of the model's tokens; the first caller reads it."""
        with self._reading:
            if self._vocabulary is None:
                package = llguidance()
                self._parallel = package.LLExecutor()
                sizes = self._tokenizer, self._eos_token_ids, self._vocab_size
                self._vocabulary = read_vocabulary(package, *sizes)
                self._trials = GrammarTrials(outline(*sizes), _LIMITS, self._max_cpu_s)
            return self._vocabulary

    def _job(self, constraint: Constraint, vocabulary: Any) -> CompileJob:
        with self._lock:
            if self._is_closed:
                raise closed()
            if self._compiling is None:
                self._compiling = CompileThreads()
            trials = self._trials
            assert trials is not None, "they are made with the vocabulary"
            job = self._kept.get(constraint)
            if job is None or job.is_dropped:
                job = self._compiling.submit(lambda: _compile(constraint, vocabulary, trials))
                self._kept[constraint] = job
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(constraint)
            return job

    def _result(self, constraint: Constraint, job: CompileJob) -> CompiledGrammar:
        try:
            return job.result(self._max_wait_s)
        except TimeoutError:
            raise GrammarsBusyError(
                f"the {constraint.notation} was not compiled within {self._max_wait_s:g} s, as "
                "this machine is busy; its compilation goes on, so submit the request again later"
            ) from None

    def _drop(self, constraint: Constraint, job: CompileJob) -> None:
        with self._lock:
            if self._kept.get(constraint) is job:
                del self._kept[constraint]


def _compile(constraint: Constraint, vocabulary: Any, trials: GrammarTrials) -> CompiledGrammar:
    package = llguidance()
    try:
        grammar = _grammar(constraint, package)
    except (ValueError, RecursionError) as error:
        raise _invalid(constraint, str(error)) from error
    trials.check(grammar)
    limits = package.LLParserLimits(**_LIMITS)
    compiled = package.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if compiled.is_error():
        raise _invalid(constraint, compiled.get_error())
    first = compiled.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise _invalid(constraint, first.get_error())
    if constraint.notation != "json_schema":
        return CompiledGrammar(compiled)
    return CompiledGrammar(compiled, AnswerSchema(json.loads(constraint.text)))


def _grammar(constraint: Constraint, package: Any) -> str:
    """Return a constraint in llguidance's own notation; ValueError if it is malformed."""
    text = constraint.text
    if constraint.notation == "json_schema":
        rules = lark_rules(json.loads(text), "start")
        return package.LLMatcher.grammar_from_lark("\n".join(rules))
    if constraint.notation == "grammar":
        from jaxserve.engine.gbnf import is_gbnf, lark_of

        if is_gbnf(text):
            return package.LLMatcher.grammar_from_lark(lark_of(text))
        if _PARAMETRIC.search(text):
            raise ValueError("rules with a parameter (name::_) are not supported; write them out")
    return package.grammar_from(constraint.notation, text)


def _invalid(constraint: Constraint, message: str) -> InvalidGrammarError:
    message = first_line(message)
    if any(word in message.lower() for word in _BOUND_WORDS):
        return GrammarTooComplexError(
            f"the {constraint.notation} needs more time or memory than is allowed: {message}; pass "
            "a smaller one, with fewer alternatives and smaller numbers of repetitions"
        )
    return InvalidGrammarError(f"the {constraint.notation} cannot be compiled: {message}")


def read_vocabulary(
    package: Any, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int
) -> Any:
    """Return an `llguidance.LLTokenizer` of a tokenizer from a folder or a GGUF file.

    llguidance reads the bytes of byte-level and byte-fallback vocabularies itself; tokens of other
    ones are decoded one by one. A model without an end token gets one after the vocabulary, which
    it cannot choose. The model's `vocab_size` may exceed the number of tokens.

    Raises:
      InvalidGrammarError: the tokenizer has more tokens than the model.
    """
    if tokenizer.num_own_tokens > vocab_size:
        raise InvalidGrammarError(
            f"the tokenizer has {tokenizer.num_own_tokens} tokens and the model {vocab_size}; "
            "grammars need a tokenizer of the model's own"
        )
    try:
        read = package.LLTokenizer(
            tokenizer.to_json(vocab_size), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        spelt = [read.decode_bytes([token]) for token in range(vocab_size)]
    except ValueError:
        spelt = None
    # Its own encoding of a text that must come next makes control tokens of their names, which
    # the grammar then refuses.
    decoded = _Decoded(tokenizer, eos_token_ids, vocab_size, spelt)
    return package.LLTokenizer(decoded, eos_token=list(eos_token_ids) or None)


def outline(
    tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[int, dict[int, str], int]:
    """Return a vocabulary's size, the text of each control token, and the end token."""
    control = {
        token: tokenizer.decode([token], skip_special_tokens=False)
        for token in tokenizer.control_token_ids
        if token < vocab_size
    }
    return vocab_size, control, eos_token_ids[0] if eos_token_ids else vocab_size


@final
class _Decoded:
    """What `LLTokenizer` reads of a tokenizer in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        spelt: Sequence[bytes] | None = None,
    ):
        self._tokenizer = tokenizer
        self.special_token_ids = sorted(i for i in tokenizer.control_token_ids if i < vocab_size)
        size = min(tokenizer.vocab_size, vocab_size)
        texts = spelt or [
            tokenizer.decode([token], skip_special_tokens=False).encode() for token in range(size)
        ]
        self.tokens = [*texts[:size], *(b"",) * (vocab_size - size)]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else len(self.tokens)
        if not eos_token_ids:
            self.tokens.append(b"")

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False, parse_special=False)


@final
class AnswerSchema:
    """A JSON schema that a finished answer is validated against, by the package jsonschema.

    This check does not depend on the library that compiled the grammar. Regular expressions are
    left to the grammar: Python's have another syntax, and some would take minutes. So are answers
    that take too long, and those of a schema that asks for leniency. The schema must have compiled
    to a grammar.

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
        """Return why a whole answer is not an instance; None if it is one, or is not checked."""
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
        """Return the check of a keyword, with a limit on its calls."""

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
