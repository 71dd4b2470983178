"""Sampling parameters from the fields of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams
from jaxserve.server.errors import invalid
from jaxserve.server.schema.base import Asking, Choosing
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.tokens import GenerateRequest
from jaxserve.server.tools import Tools

# Fields whose name and meaning are those of `SamplingParams`.
_SAME = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "prompt_logprobs"),
    *BOUND_NAMES,
)
# Fields of vLLM that say what the answer has to match.
_VLLM = ("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice")
# Of the sampler. OpenAI's API has 64-bit seeds, negative ones too.
_NUM_SEEDS = 2**32
# The default of OpenAI's completions.
_COMPLETION_TOKENS = 16


def of_chat(body: ChatRequest, tools: Tools) -> SamplingParams:
    """Return the sampling parameters of a chat.

    Args:
      tools: those of the request, which may have a grammar.

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
    constraint = constraint_of(body.response_format, tools, "response_format")
    _check_one_constraint(body, constraint)
    if tools.is_given and body.skip_special_tokens:
        raise invalid(
            "skip_special_tokens=true and tools exclude each other, since calls may be marked by "
            "special tokens; leave skip_special_tokens out",
            "skip_special_tokens",
        )
    return _params(body, max_tokens=most, n=body.n or 1, logprobs=logprobs, **constraint)


def of_completion(body: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters of a completion.

    Raises:
      InvalidSamplingParamsError, RefusedError: fields contradict each other.
    """
    _check_streaming(body)
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and (body.stream or not body.echo):
        raise invalid(
            "max_tokens=0 needs echo=true and stream=false; pass at least 1", "max_tokens"
        )
    others: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise invalid("echo with logprobs cannot be streamed; pass stream=false", "echo")
        others["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    # The prompt's log-probabilities come with a token, which the answer then leaves out.
    most = max(most, 1)
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


def _check_one_constraint(body: ChatRequest, constraint: Mapping[str, Any]) -> None:
    """Check that a chat has no field of vLLM beside a constraint of its format or tools."""
    own = next((name for name in _VLLM if getattr(body, name) is not None), None)
    given = constraint.keys() - {"skip_special_tokens"}
    if own is None or not given:
        return
    other = "response_format" if of_format(body.response_format) else "tool_choice"
    raise invalid(
        f"{own} and {other} both say what the answer has to match; leave one of them out", own
    )


def _params(body: Choosing, **others: Any) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    given.setdefault("temperature", 1.0)
    if body.seed is not None:
        given["seed"] = body.seed % _NUM_SEEDS
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.stop is not None:
        given["stop"] = body.stop if isinstance(body.stop, str) else tuple(body.stop)
        given["stop"] = given["stop"] or ()
    if body.logit_bias is not None:
        given["logit_bias"] = _bias(body.logit_bias)
    given |= _vllm_constraints(body)
    return SamplingParams(**{**given, **others})


def _vllm_constraints(body: Choosing) -> dict[str, Any]:
    """Return the constraint of vLLM's fields, the older ones and `structured_outputs`."""
    given: dict[str, Any] = {
        "json_schema": body.guided_json,
        "regex": body.guided_regex,
        "grammar": body.guided_grammar,
        "choice": body.guided_choice,
    }
    given = {name: value for name, value in given.items() if value is not None}
    outputs = body.structured_outputs
    if outputs is None:
        return given
    if given:
        raise invalid("structured_outputs and guided_* exclude each other", "structured_outputs")
    named = outputs.model_dump(exclude_none=True)
    if "json_" in named:
        named["json_schema"] = named.pop("json_")
    if len(named) != 1 or named.get("json_object") is False:
        raise invalid(
            "structured_outputs needs exactly one field that is set", "structured_outputs"
        )
    return named


def constraint_of(form: Any, tools: Tools, name: str) -> dict[str, Any]:
    """Return the constraint of a format, or of the tools that have to be called.

    Args:
      name: of the format's field.

    Raises:
      RefusedError: both are given.
    """
    wanted = of_format(form)
    if tools.is_given and wanted:
        raise invalid(
            f"tools and a {name} of JSON exclude each other; leave one of them out, or pass "
            "tool_choice='none'",
            name,
        )
    return {**wanted, **tools.params}


def of_format(form: Any) -> dict[str, Any]:
    """Return the constraint of a `response_format`, or of a `text.format`; none for text."""
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_object": True}
    return {"json_schema": form.given_schema}


def _bias(given: dict[str, float]) -> dict[int, float]:
    bad = next((key for key in given if not re.fullmatch("[0-9]{1,10}", key)), None)
    if bad is not None:
        raise invalid(f"the key {bad!r:.40} of logit_bias is not a token id", "logit_bias")
    return {int(key): bias for key, bias in given.items()}
