"""Converts prompts to validated requests."""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from jaxserve.core.errors import (
    EmptyPromptError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    OtherTaskError,
    PromptTooLongError,
    TokenOutOfRangeError,
)
from jaxserve.core.request import (
    MAX_PRIORITY,
    EncoderPrompts,
    Request,
    check_id,
    check_messages,
    deadline_at,
    drawn_seed,
)
from jaxserve.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.engine.grammars import CompiledGrammar, Grammars
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.models.config import DecoderConfig
    from jaxserve.models.thinking import Thinking
    from jaxserve.models.tokenizer import Tokenizer

_OWN_IDS = "request-"
# Iterables of integers that are not token ids.
_BYTES = (bytes, bytearray, memoryview)

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def as_batch(prompts: Any) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether `prompts` is one prompt (text, token ids, chat).

    Raises:
      InvalidRequestError: `prompts` is neither a prompt nor an iterable of prompts.
    """
    if isinstance(prompts, (str, Mapping, *_BYTES)):
        return [prompts], True
    try:
        batch = list(prompts)
    except TypeError:
        raise _not_a_prompt(prompts) from None
    return ([batch], True) if _is_one_prompt(batch) else (batch, False)


def _is_one_prompt(items: list[Any]) -> bool:
    """Return whether a list is one prompt, and not a batch in which some prompt may be wrong."""
    if set(map(type, items)) == {int}:  # the usual case, and histories are long
        return True
    if not items or not (isinstance(items[0], Mapping) or _is_token(items[0])):
        return False
    return not any(_is_sequence(item) for item in items)


def _is_sequence(item: Any) -> bool:
    return (
        hasattr(item, "__iter__") and not isinstance(item, Mapping) and getattr(item, "ndim", 1) > 0
    )


def _is_token(item: Any) -> bool:
    return (
        hasattr(item, "__index__") and not isinstance(item, bool) and getattr(item, "ndim", 0) == 0
    )


def _not_a_prompt(given: Any) -> InvalidRequestError:
    if isinstance(given, _BYTES):
        return InvalidRequestError(
            f"a prompt of type {type(given).__name__} is not understood; pass text, for example "
            "prompt.decode('utf-8')"
        )
    return InvalidRequestError(
        f"a prompt of type {type(given).__name__} is not understood; pass a string, a list of "
        "token ids, or a list of chat messages"
    )


@final
class RequestBuilder:
    """A builder of one model's requests: it tokenizes, adds end tokens and checks every limit.

    Args:
      tokenizer: None restricts prompts to token ids.
      max_prompt_tokens: returns the length of the longest prompt that leaves room for one output
        token, which changes when the page pool is resized.
      seed: seed of requests that do not set one.
      encoder: what an encoder-decoder model adds to prompts; None for other models.
      model: configuration of the model, whose task requests must have; None to check no task.
      grammars: compiles the grammars of requests; None without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_prompt_tokens: Callable[[], int],
        seed: int,
        encoder: EncoderPrompts | None = None,
        grammars: Grammars | None = None,
        model: DecoderConfig | None = None,
    ):
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._encoder = encoder
        self._model = model
        self._numbers = itertools.count()

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        arrival_s: float,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        conversation_id: str | None = None,
    ) -> Request:
        """Return a request that the engine can serve; `Service.submit` documents the arguments.

        Raises:
          InvalidRequestError: the prompt cannot be served; one of its subclasses.
          MissingExtraError: it has a grammar, and the package that compiles it is not installed.
          RuntimeClosedError: it has a grammar, and the runtime was closed.
        """
        number = next(self._numbers)
        check_id(request_id, _OWN_IDS)
        is_whole = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_whole or abs(priority) > MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority={reprlib.repr(priority)} is not allowed; pass a whole number of "
                f"{-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if self._model is not None:
            _check_task(self._model, params)
        deadline_at_s = deadline_at(deadline_s, arrival_s)
        stop_token_ids = self._check_params(params)
        kwargs = params.template_kwargs
        tokens = self.prompt_tokens(prompt, pools=params.pools, template_kwargs=kwargs)
        thinking = self._thinking(prompt, tokens, params)
        if thinking is None and params.max_thinking_tokens is not None:
            params = replace(params, max_thinking_tokens=None)  # no token has to be followed
        grammar = self._compiled(params)
        num_encoded = num_padding = 0
        if self._encoder is not None:
            tokens, num_encoded, num_padding = self._encoder.around(tokens)
        return Request(
            id=request_id if request_id is not None else f"{_OWN_IDS}{number}",
            prompt=tokens,
            params=params,
            arrival_s=arrival_s,
            stop_token_ids=stop_token_ids,
            end_token_ids=self._eos_token_ids,
            seed=drawn_seed(self._seed, number) if params.seed is None else params.seed,
            priority=priority,
            deadline_s=deadline_at_s,
            conversation_id=conversation_id,
            num_encoded=num_encoded,
            num_padding=num_padding,
            grammar=grammar,
            thinking=thinking,
        )

    def _thinking(
        self, prompt: Prompt, tokens: tuple[int, ...], params: SamplingParams
    ) -> Thinking | None:
        """Return how the answer may think; None for a prompt that is not a chat."""
        if self._tokenizer is None or params.pools or self._encoder is not None:
            return None
        is_read = params.separate_reasoning or _is_chat(prompt)
        thinking = self._tokenizer.thinking_after(tokens) if is_read else None
        if thinking is not None and params.is_followed and not thinking.is_writable:
            raise InvalidRequestError(
                "a grammar, a schema, a call that is demanded, or max_thinking_tokens need the "
                "notation of the model's answers, and its response template says only how they are "
                "read; leave them out"
            )
        if thinking is None or not params.is_constrained:
            return thinking
        return thinking.up_to_its_mark()

    def prompt_tokens(
        self,
        prompt: Prompt,
        *,
        pools: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt that can be served; InvalidRequestError for any other.

        One that is pooled may fill the context, and a chat has no beginning of an answer then.
        """
        tokens = self._tokens(prompt, pools=pools, template_kwargs=template_kwargs)
        self._check_tokens(tokens, self._max_prompt_tokens() + pools)
        return tokens

    def build_item(self, item: WorkloadItem, arrival_s: float) -> Request:
        """Return the request of a workload's item; InvalidRequestError if it cannot be served."""
        return self.build(
            item.prompt_token_ids,
            item.params(),
            arrival_s,
            priority=item.priority,
            deadline_s=item.deadline_s,
            conversation_id=item.conversation_id,
        )

    def _tokens(
        self, prompt: Prompt, *, pools: bool, template_kwargs: Mapping[str, Any] | None
    ) -> tuple[int, ...]:
        if template_kwargs and not _is_chat(prompt):
            raise InvalidRequestError(
                "template_kwargs are variables of a chat template, and this prompt is not a list "
                "of chat messages; leave them out, or pass messages"
            )
        if isinstance(prompt, str):
            if not prompt:
                raise EmptyPromptError("the prompt is an empty string; pass at least one character")
            return _encoded(self._need_tokenizer("a text prompt").encode, prompt)
        if isinstance(prompt, (Mapping, *_BYTES)) or not hasattr(prompt, "__iter__"):
            raise _not_a_prompt(prompt)
        items: list[Any] = list(prompt)
        if not items:
            raise EmptyPromptError("the prompt is empty; pass at least one token or message")
        if set(map(type, items)) == {int}:  # the usual case, and histories are long
            return tuple(items)
        if all(isinstance(item, Mapping) for item in items):
            check_messages(items)
            render = self._need_tokenizer("a chat").apply_chat_template
            render = partial(render, add_generation_prompt=not pools, variables=template_kwargs)
            return _encoded(render, items)
        try:
            if all(_is_token(item) for item in items):
                return tuple(operator.index(item) for item in items)
        except TypeError:  # an array of floats has `__index__` and raises
            pass
        raise InvalidRequestError(
            "a prompt is either all token ids (whole numbers) or all chat messages "
            f"({{'role': ..., 'content': ...}}); this list starts with {items[0]!r}"
        )

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{what} needs a tokenizer and this runtime has none; pass token ids, or pass "
                "tokenizer= to Runtime"
            )
        return self._tokenizer

    def _check_tokens(self, tokens: tuple[int, ...], most: int) -> None:
        if not tokens:
            raise EmptyPromptError(
                "the prompt has no tokens after tokenization; pass some text that is not empty"
            )
        bad = [token for token in tokens if not 0 <= token < self._vocab_size]
        if bad:
            raise TokenOutOfRangeError(
                f"token id {bad[0]} ({len(bad)} such in the prompt) is outside the vocabulary of "
                f"{self._vocab_size}; ids range from 0 to {self._vocab_size - 1}"
            )
        if len(tokens) > most and self._encoder is not None:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; at most {most} fit in one step of the "
                "encoder and leave room for an answer. Shorten it, or raise max_step_tokens, "
                "max_context (up to the model's longest context) or kv_memory (Runtime.resize_kv)"
            )
        if len(tokens) > most:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; at most {most} leave "
                "room for an answer in this runtime's context and page pool. Shorten it, or raise "
                "max_context (up to the model's longest context) or kv_memory (Runtime.resize_kv)"
            )

    def _check_params(self, params: SamplingParams) -> tuple[int, ...]:
        named = [*params.stop_token_ids, *(params.logit_bias or {})]
        bad = [token for token in named if token >= self._vocab_size]
        if bad:
            raise TokenOutOfRangeError(
                f"stop_token_ids or logit_bias name token {bad[0]}, outside the vocabulary of "
                f"{self._vocab_size}"
            )
        if params.stop and self._tokenizer is None:
            raise InvalidSamplingParamsError(
                f"stop={params.stop!r} needs a tokenizer and this runtime has none; use "
                "stop_token_ids"
            )
        if params.prompt_logprobs is not None and self._encoder is not None:
            raise InvalidSamplingParamsError(
                f"prompt_logprobs={params.prompt_logprobs}: the prompt of an encoder-decoder model "
                "has no log-probabilities, since its encoder predicts no tokens; leave it out"
            )
        eos = () if params.ignore_eos else self._eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
        # Before `min_tokens` the model's own are forbidden, also where they end nothing.
        listed = {*stop_token_ids, *self._eos_token_ids} if params.min_tokens else stop_token_ids
        if len(listed) > MAX_STOP_TOKEN_IDS:
            raise InvalidSamplingParamsError(
                f"{len(listed)} stop tokens with the model's own {len(self._eos_token_ids)}, at "
                f"most {MAX_STOP_TOKEN_IDS} are allowed; use `stop` strings for the rest"
            )
        return stop_token_ids

    def _compiled(self, params: SamplingParams) -> CompiledGrammar | None:
        if params.constraint is None:
            return None
        if self._grammars is None:
            raise InvalidSamplingParamsError(
                "structured output needs a tokenizer; pass tokenizer= to Runtime"
            )
        return self._grammars.compiled(params.constraint)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _encoded(encode: Callable[[Any], Iterable[int]], given: Any) -> tuple[int, ...]:
    try:
        return tuple(encode(given))
    except (TypeError, UnicodeError) as error:
        raise InvalidRequestError(
            f"the prompt cannot be encoded: {error}; pass text that is valid Unicode, without "
            "lone surrogates"
        ) from error


def _check_task(config: DecoderConfig, params: SamplingParams) -> None:
    """Raise OtherTaskError if a request is for something that the model does not do."""
    if params.pools and config.has_encoder:
        raise OtherTaskError(
            "this is an encoder-decoder model, which embeds and classifies no texts; call "
            "generate(), or encode() for the states of its encoder"
        )
    if not params.pools and not config.generates:
        raise OtherTaskError(f"{kind_of(config)}, which generates no tokens; {remedy_of(config)}")


def kind_of(config: DecoderConfig) -> str:
    """Return what a model is, as the beginning of an error about its task."""
    labels = config.labels
    if labels is not None and labels.token_ids:
        return "this is a reranker"
    if labels is not None and len(labels.names) == 1:
        return "this is a reward model or reranker, with one label"
    if labels is not None:
        return f"this is a classifier with {len(labels.names)} labels"
    return "this is a model of tokens" if config.generates else "this is a model without a head"


def remedy_of(config: DecoderConfig) -> str:
    """Return the calls that a model serves, as the end of an error about its task."""
    if config.labels is not None:
        calls = "classify() or rerank() (/v1/rerank)" if config.labels.ranks else "classify()"
        return f"call {calls}"
    also = "generate() or " if config.generates else ""
    return f"call {also}embed() (/v1/embeddings)"
