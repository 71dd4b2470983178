"""Sampling parameters from the fields of a request."""

from __future__ import annotations

import re
from typing import Any

from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams
from jaxserve.server.errors import invalid
from jaxserve.server.schema import Asking, Choosing
from jaxserve.server.tools import Tools

# Fields with the same name and meaning as in `SamplingParams`.
_SAME = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "prompt_logprobs"),
    *BOUND_NAMES,
)
# Range of the sampler. OpenAI's API has 64-bit seeds, also negative ones.
_NUM_SEEDS = 2**32


def check_streaming(body: Asking) -> None:
    """Check that stream options come with a stream, and that everything can be streamed."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    if body.stream:
        check_no_prompt_logprobs(body)


def check_no_prompt_logprobs(body: Choosing) -> None:
    """Check that a streamed answer has no log-probabilities of its prompt."""
    if body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed; pass stream=false", "prompt_logprobs")


def sampling_params(body: Choosing, **others: Any) -> SamplingParams:
    """Return the parameters of the fields that all endpoints share, and of additional ones."""
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


def constraint_of(form: Any, tools: Tools) -> dict[str, Any]:
    """Return the constraint of an answer's format, of the tools that must be called, or of both."""
    wanted = of_format(form)
    if tools.is_given and wanted:
        return tools.or_answer(wanted.get("json_schema", {"type": "object"}))
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
