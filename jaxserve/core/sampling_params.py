"""The sampling parameters of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, final

from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.core.suggestions import PARAMS_ELSEWHERE, explain_unknown

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


# Variables that templates get from elsewhere.
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def checked_kwargs(given: Any) -> dict[str, Any]:
    """Return variables of a chat template as plain JSON; else InvalidSamplingParamsError."""
    try:
        plain = json.loads(json.dumps(dict(given), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSamplingParamsError(
            f"template_kwargs={given!r:.200} is not plain JSON: {error}; pass a mapping such as "
            '{"enable_thinking": False}'
        ) from None
    bad = next((n for n in plain if not n.isidentifier() or n in _OWN_VARIABLES), None)
    if bad is not None:
        raise InvalidSamplingParamsError(
            f"template_kwargs has the name {bad!r}; names are those of variables that the chat "
            f"template reads, except {', '.join(_OWN_VARIABLES)}"
        )
    return plain


# Sizes of per-slot device arrays; parameters that need more are refused at construction.
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 128
MAX_LOGPROBS = 20
# The host searches each new token's text for all stop strings, on the engine's thread.
MAX_STOPS = 64
MAX_STOP_CHARS = 256
_INT32_MAX = 2**31 - 1
# Fields that bound latencies, in seconds.
BOUND_NAMES = ("latency_bound", "first_token_bound", "token_bound")


@final
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request, validated at construction.

    They are applied in this order, as in vLLM: the grammar, penalties, logit bias, `min_tokens`,
    temperature, top-k, top-p over the tokens that top-k kept, min-p. Tokens tied at a top-k or
    top-p threshold are all kept.

    Attributes:
      max_tokens: maximum number of output tokens, at most 2**31 - 1; None for as many as the
        context holds.
      min_tokens: before this number of output tokens, stop tokens and the model's end tokens are
        forbidden, also with `ignore_eos`, and no stop string counts, as in vLLM.
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens; 0 and -1 keep all.
      top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
      min_p: drop tokens less likely than this times the likeliest one, in [0, 1]; 1 keeps only
        tokens tied with it.
      repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
        output; 0.01 to 100, 1 is off.
      presence_penalty, frequency_penalty: subtracted once, or per occurrence, for output tokens.
      logit_bias: token id -> number added to its logit; at most 128 ids.
      seed: the random stream depends on it and on the position only, never on the batch.
      n: number of independent samples of the prompt; they share the prompt's pages.
      stop: strings that end the output and are not part of it; at most 64, each of at most 256
        characters. The whole text of a control token counts even if `text` omits the token.
      stop_token_ids: tokens that end the output, in addition to the model's end tokens; at most 16
        with those.
      ignore_eos: continue past the model's end token, which may then be in the output, as in vLLM.
      logprobs: None for none, 0 for the sampled token's, k for the k likeliest tokens' too. They
        are the model's log-probabilities, before penalties, bias and temperature; see
        `TokenLogprob` for those after.
      prompt_logprobs: the same for every prompt token except the first.
      pools: return `Completion.pooled`, the model's state or its labels' logits for the prompt, and
        no token. `Runtime.embed`, `classify` and `rerank` make such requests. Of the other fields
        only `adapter` counts.
      forced_length: for measurements, the exact number of output tokens, unless a stop ends the
        output earlier: one number for all samples, or one per sample. It is hidden from policies.
      skip_special_tokens: omit special tokens from `text`.
      latency_bound: maximum seconds from the submission to the end of the answer, time in the queue
        included; None for no bound.
      first_token_bound: the same to the first token.
      token_bound: mean seconds per token after the first. Policy "auto" and those of ExeGPT put
        requests with a bound first; other policies refuse them with `UnheededBoundError`. A request
        that is expected to miss a bound is refused with `BoundNotMetError`, at its submission or
        while it waits (`docs/latency_bounds.md`).
      tenant: the customer or group that sends the request: policy "vtc" serves all equally. A
        string that is not empty, or None; a server takes it from the field `user`.
      adapter: name of a loaded adapter (`Runtime.load_adapter`); None for the weights without one.
      json_schema: the answer is JSON that validates: a mapping, or its JSON text, as which it is
        stored.
      json_object: the answer is any JSON object.
      regex: the whole answer matches this regular expression, in the syntax of Rust's `regex`.
      grammar: the answer matches a Lark or GBNF grammar.
      choice: the answer is one of these strings. At most one of these five may be given
        (`docs/structured_output.md`). After a chat, they bind from the end of the thinking on.
      separate_reasoning: put what the model thinks into `reasoning` in place of `text`. None does
        so for a prompt of chat messages, True for any prompt that ends as the model's chats do, and
        False for none.
      max_thinking_tokens: after this many tokens of thinking its end is written, and the answer
        goes on; None for no limit. It has no effect on a model that does not think.
      template_kwargs: variables of the chat template, for a prompt of chat messages, such as
        `{"enable_thinking": False}`; plain JSON.

    Raises:
      InvalidSamplingParamsError: a field is unknown or out of range; the message names it.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pools: bool = False
    forced_length: int | tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    latency_bound: float | None = None
    first_token_bound: float | None = None
    token_bound: float | None = None
    tenant: str | None = None
    adapter: str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    separate_reasoning: bool | None = None
    max_thinking_tokens: int | None = None
    template_kwargs: Mapping[str, Any] | None = None

    if not TYPE_CHECKING:  # type checkers and editors know the fields

        def __new__(cls, *_: Any, **given: Any) -> Self:
            known = [field.name for field in fields(cls)]
            if unknown := given.keys() - known:
                raise InvalidSamplingParamsError(explain_unknown(unknown, known, PARAMS_ELSEWHERE))
            return super().__new__(cls)

    def __repr__(self) -> str:
        """Return `max_tokens`, `temperature` and the fields that differ from their defaults."""
        shown = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name in ("max_tokens", "temperature")
            or getattr(self, field.name) != field.default
        )
        return f"SamplingParams({', '.join(shown)})"

    def __post_init__(self) -> None:
        if self.top_k == -1 and not isinstance(self.top_k, bool):
            object.__setattr__(self, "top_k", 0)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._convert("stop", stop, tuple, "a string or a list of strings")
        self._convert("stop_token_ids", self.stop_token_ids, tuple, "a list of token ids")
        if self.logit_bias is not None:
            self._convert("logit_bias", self.logit_bias, dict, "a mapping of token id to number")
        if isinstance(self.forced_length, list):
            object.__setattr__(self, "forced_length", tuple(self.forced_length))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        if self.choice is not None and not isinstance(self.choice, str):
            self._convert("choice", self.choice, tuple, "a list of strings")
        if self.template_kwargs is not None:
            object.__setattr__(self, "template_kwargs", checked_kwargs(self.template_kwargs))
        self._check_ranges()
        self._check_contradictions()
        check_constraints(self)

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint on the output; None for any output."""
        return Constraint.of(
            json_schema=self.json_schema,  # pyrefly: ignore[bad-argument-type]  # text, see __post_init__
            regex=self.regex,
            grammar=self.grammar,
            choice=self.choice,
            json_object=self.json_object,
        )

    @property
    def bounds(self) -> dict[str, float]:
        """Return the given latency bounds, in seconds by the names of their fields."""
        given = {name: getattr(self, name) for name in BOUND_NAMES}
        return {name: bound_s for name, bound_s in given.items() if bound_s is not None}

    @property
    def only_scores(self) -> bool:
        """Whether it asks for what the model makes of the prompt and for no answer.

        `Runtime.score` asks for log-probabilities and one token.
        """
        return self.pools or (self.prompt_logprobs is not None and self.max_tokens == 1)

    @property
    def is_constrained(self) -> bool:
        return self.json_object or not (
            self.json_schema is self.regex is self.grammar is self.choice is None
        )

    @property
    def is_followed(self) -> bool:
        """Whether the host has to read each token before the next one is chosen."""
        return self.max_thinking_tokens is not None or self.is_constrained

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def forced_lengths(self) -> tuple[int, ...] | None:
        """Return the forced length of each of the n samples; None if none is forced."""
        if self.forced_length is None or isinstance(self.forced_length, tuple):
            return self.forced_length
        return (self.forced_length,) * self.n

    def _convert(self, name: str, value: Any, kind: type, allowed: str) -> None:
        try:
            object.__setattr__(self, name, kind(value))
        except (TypeError, ValueError):
            raise InvalidSamplingParamsError(
                f"{name}={value!r} is not allowed; pass {allowed}"
            ) from None

    def _check_ranges(self) -> None:
        top = MAX_LOGPROBS
        inf = math.inf
        _whole("max_tokens", self.max_tokens, 1, _INT32_MAX, optional=True)
        _whole("min_tokens", self.min_tokens, 0, _INT32_MAX)
        _whole("top_k", self.top_k, 0, _INT32_MAX)
        _whole("n", self.n, 1, 1024)
        for length in self.forced_lengths or ():
            _whole("forced_length", length, 1, _INT32_MAX)
        _whole("seed", self.seed, 0, 2**32 - 1, optional=True)
        _whole("logprobs", self.logprobs, 0, top, optional=True)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, top, optional=True)
        _whole("max_thinking_tokens", self.max_thinking_tokens, 0, _INT32_MAX, optional=True)
        if self.separate_reasoning not in (None, True, False):
            raise InvalidSamplingParamsError(
                f"separate_reasoning={self.separate_reasoning!r} is not allowed; pass True, False "
                "or None"
            )
        self._keep_real("temperature", 0.0, 100.0)
        self._keep_real("top_p", 0.0, 1.0, open_low=True)
        self._keep_real("min_p", 0.0, 1.0)
        self._keep_real("repetition_penalty", 0.01, 100.0)
        self._keep_real("presence_penalty", -100.0, 100.0)
        self._keep_real("frequency_penalty", -100.0, 100.0)
        for name in self.bounds:
            self._keep_real(name, 0.0, 1e9, open_low=True)
        if self.tenant is not None and (not isinstance(self.tenant, str) or not self.tenant):
            raise InvalidSamplingParamsError(
                f"tenant={self.tenant!r} is not allowed; pass a string that is not empty, or None"
            )
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise InvalidSamplingParamsError(
                f"adapter={self.adapter!r} is not allowed; pass the name of a loaded adapter, or "
                "None"
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, inf)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidSamplingParamsError(
                f"stop={self.stop!r} is not allowed; pass non-empty strings only"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidSamplingParamsError(
                f"a string of stop has {longest} characters, and at most {MAX_STOP_CHARS} are "
                "allowed; shorten it"
            )
        for token_id, bias in (self.logit_bias or {}).items():
            _whole("a logit_bias token id", token_id, 0, inf)
            _real(f"logit_bias[{token_id}]", bias, -1e9, 1e9)

    def _keep_real(self, name: str, low: float, high: float, **is_open: bool) -> None:
        """Check a field, and convert a scalar of another library to a number of Python."""
        value = getattr(self, name)
        number = _real(name, value, low, high, **is_open)
        if not isinstance(value, (int, float)):
            object.__setattr__(self, name, number)

    def _check_contradictions(self) -> None:
        if self.pools:
            self._check_pools()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParamsError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "raise max_tokens or lower min_tokens"
            )
        lengths = self.forced_lengths
        if lengths is not None and len(lengths) != self.n:
            raise InvalidSamplingParamsError(
                f"forced_length={self.forced_length} has {len(lengths)} lengths for n={self.n}; "
                "pass one per sample, or one number for all"
            )
        if self.max_tokens is not None and max(lengths or (0,)) > self.max_tokens:
            raise InvalidSamplingParamsError(
                f"forced_length={self.forced_length} is more than max_tokens={self.max_tokens}; "
                "raise max_tokens"
            )
        if self.is_greedy and self.n > 1:
            raise InvalidSamplingParamsError(
                f"n={self.n} with temperature=0 would give {self.n} identical samples; "
                "set a temperature above 0, or n=1"
            )
        if len(self.stop) > MAX_STOPS:
            raise InvalidSamplingParamsError(
                f"{len(self.stop)} strings of stop were given, and at most {MAX_STOPS} are "
                "allowed; keep the most important ones"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidSamplingParamsError(
                f"{len(self.stop_token_ids)} stop_token_ids were given, and at most "
                f"{MAX_STOP_TOKEN_IDS} are allowed; use `stop` strings for the others"
            )
        if len(self.logit_bias or ()) > MAX_LOGIT_BIAS:
            raise InvalidSamplingParamsError(
                f"logit_bias has {len(self.logit_bias or ())} tokens, and at most "
                f"{MAX_LOGIT_BIAS} are allowed; keep the most important ones"
            )

    def _check_pools(self) -> None:
        for name in ("n", "logprobs", "prompt_logprobs", "forced_length", "min_tokens", "stop"):
            given = getattr(self, name)
            if given not in (None, (), 0, 1) or (given is not None and "logprobs" in name):
                raise InvalidSamplingParamsError(
                    f"{name}={given!r} with pools=True, which returns no token; omit one of them"
                )
        for name, is_given in (("a grammar", self.is_constrained), ("a bound", self.bounds)):
            if is_given:
                raise InvalidSamplingParamsError(
                    f"{name} with pools=True, which returns no token; omit one of them"
                )


def _whole(name: str, value: object, low: float, high: float, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_int = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_int or not low <= value <= high:  # pyrefly: ignore[unsupported-operation]
        most = "" if high == math.inf else f" and at most {high}"
        none = ", or None" if optional else ""
        raise InvalidSamplingParamsError(
            f"{name}={value!r} is not allowed; pass a whole number of at least {low}{most}{none}"
        )


def _real(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)  # pyrefly: ignore[bad-argument-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise InvalidSamplingParamsError(
            f"{name}={value!r} is not allowed; pass a number in {bounds}"
        )
    return number
