"""Sampling parameters from the fields of a request."""

from __future__ import annotations

from typing import Any

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.errors import invalid
from jaxserve.server.schema.base import Asking, Choosing
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.tokens import GenerateRequest

# Fields whose name and meaning are those of `SamplingParams`.
_SAME = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "prompt_logprobs", "latency_bound"),
)
# The default of OpenAI's completions.
_COMPLETION_TOKENS = 16


def of_chat(body: ChatRequest) -> SamplingParams:
    """Return the sampling parameters of a chat.

    Raises:
      InvalidSamplingParamsError, RefusedError: fields contradict each other.
    """
    _check_streaming(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    given = (body.max_completion_tokens, body.max_tokens)
    if None not in given and given[0] != given[1]:
        raise invalid(
            f"max_completion_tokens={given[0]} and max_tokens={given[1]} contradict each other; "
            "pass max_completion_tokens only",
            "max_tokens",
        )
    most = given[1] if given[0] is None else given[0]
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, max_tokens=most, n=body.n or 1, logprobs=logprobs)


def of_completion(body: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters of a completion.

    Raises:
      InvalidSamplingParamsError, RefusedError: fields contradict each other.
    """
    _check_streaming(body)
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    others: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise invalid("echo with logprobs cannot be streamed; pass stream=false", "echo")
        others["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _params(body, max_tokens=most, n=body.n or 1, logprobs=body.logprobs, **others)


def of_generate(body: GenerateRequest) -> SamplingParams:
    """Return the sampling parameters of tokens in and out.

    Raises:
      InvalidSamplingParamsError: fields contradict each other.
    """
    given = body.sampling_params
    if body.stream:
        _check_no_prompt_logprobs(given)
    return _params(given, max_tokens=given.max_tokens, n=given.n or 1, logprobs=given.logprobs)


def _check_streaming(body: Asking) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    if body.stream:
        _check_no_prompt_logprobs(body)


def _check_no_prompt_logprobs(body: Choosing) -> None:
    if body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed; pass stream=false", "prompt_logprobs")


def _params(body: Choosing, **others: Any) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    given.setdefault("temperature", 1.0)
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.stop is not None:
        given["stop"] = body.stop if isinstance(body.stop, str) else tuple(body.stop)
        given["stop"] = given["stop"] or ()
    if body.logit_bias is not None:
        given["logit_bias"] = _bias(body.logit_bias)
    return SamplingParams(**{**given, **others})


def _bias(given: dict[str, float]) -> dict[int, float]:
    bad = next((key for key in given if not (key.isascii() and key.isdigit())), None)
    if bad is not None:
        raise invalid(f"the key {bad!r} of logit_bias is not a token id", "logit_bias")
    return {int(key): bias for key, bias in given.items()}
