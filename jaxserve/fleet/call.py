"""A request as a fleet sends it to a replica."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.scheduling.router import page_hashes

# Characters of English text per token for the vocabularies of the registered models. Only replicas
# tokenize.
_CHARACTERS_A_TOKEN = 4


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A request, and the values by which it is routed.

    Attributes:
      id: request id, unique in a fleet.
      prompt: prompt in plain Python types; the replica checks it.
      params: parameters with a seed, so that every replica generates the same tokens.
      deadline_s: deadline on the fleet's clock; None for no deadline.
      pages: `page_hashes` of the prompt's tokens if they are known, else of its characters.
      num_prompt_tokens: number of tokens, counted or estimated from the length of the text.
      has_tokens: whether the prompt's tokens are known.
      conversation_id: id of the conversation of which this is a turn; None for other requests.
    """

    id: str
    prompt: Any
    params: SamplingParams
    priority: int
    pages: list[int]
    num_prompt_tokens: int
    has_tokens: bool
    deadline_s: float | None = None
    conversation_id: str | None = None


def pays(call: Call, num_cached: int, page_size: int) -> bool:
    """Return whether the prompt of a call should be computed apart from its answer.

    It should not where it has no full page, or where a replica that answers has half of its pages.
    Prompts whose log-probabilities are wanted are computed with their answers, and so are requests
    with a latency bound of their own.

    Args:
      num_cached: leading pages that a replica has which answers.
    """
    params = call.params
    if params.prompt_logprobs is not None or params.bounds:
        return False
    return call.num_prompt_tokens > page_size and 2 * num_cached < max(1, len(call.pages))


def make_call(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    *,
    priority: int,
    page_size: int,
    deadline_s: float | None = None,
    conversation_id: str | None = None,
) -> Call:
    """Return the call for a prompt of any type. It raises nothing, since a replica checks it."""
    prompt = _plain(prompt)
    text = _text(prompt)
    has_tokens = text is None and isinstance(prompt, list) and _are_token_ids(prompt)
    if text is not None:
        pages = page_hashes(text, page_size * _CHARACTERS_A_TOKEN)
        num_tokens = -(-len(text) // _CHARACTERS_A_TOKEN)
    elif has_tokens:
        pages, num_tokens = page_hashes(tuple(prompt), page_size), len(prompt)
    else:
        pages, num_tokens = [], 0
    return Call(
        id=request_id,
        prompt=prompt,
        params=params,
        priority=priority,
        pages=pages,
        num_prompt_tokens=num_tokens,
        has_tokens=has_tokens,
        deadline_s=deadline_s,
        conversation_id=conversation_id,
    )


def cancelled_completion(call: Call, arrival_s: float) -> Completion:
    """Return the completion of a request that no replica worked on."""
    sample = Sample(text="", token_ids=(), finish_reason="cancelled")
    return Completion(
        request_id=call.id,
        prompt_token_ids=(),
        samples=(sample,) * call.params.n,
        timing=Timing(arrival_s=arrival_s, finished_s=arrival_s),
    )


def _plain(prompt: Any) -> Any:
    """Return arrays and generators as lists, and integers of any library as Python's `int`."""
    if isinstance(prompt, (str, Mapping)) or not hasattr(prompt, "__iter__"):
        return prompt
    return [_plain_item(item) for item in prompt]


def _plain_item(item: Any) -> Any:
    try:
        return item if isinstance(item, bool) else operator.index(item)
    except TypeError:
        return item


def _are_token_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) for item in items)


def _text(prompt: Any) -> str | None:
    """Return a text for routing: a text prompt, or all messages of a chat in order.

    The text of a turn begins with the text of the previous turns.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(item, Mapping) for item in prompt):
        return None
    return "".join(f"{message.get('role')}\n{message.get('content')}\n" for message in prompt)
