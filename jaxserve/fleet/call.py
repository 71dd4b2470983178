"""A request before any replica has seen it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.scheduling.router import page_hashes

# Of English text under the vocabularies of the models here; replicas do the tokenizing.
_CHARACTERS_A_TOKEN = 4


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What is sent to a replica, and what it is routed by.

    Attributes:
      id: unique in a fleet.
      prompt: in plain types; it may turn out not to be one.
      params: with a seed, so that every replica gives the same answer.
      pages: its `page_hashes`, of tokens where they are known, else of characters.
      num_prompt_tokens: counted, or guessed from the length of the text.
      has_tokens: whether they are known.
      conversation_id: whose turn it is, if anybody's.
    """

    id: str
    prompt: Any
    params: SamplingParams
    priority: int
    pages: list[int]
    num_prompt_tokens: int
    has_tokens: bool
    conversation_id: str | None = None


def make_call(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    *,
    priority: int,
    page_size: int,
    conversation_id: str | None = None,
) -> Call:
    """Whatever the user gave as a prompt; a replica judges it."""
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
        conversation_id=conversation_id,
    )


def _plain(prompt: Any) -> Any:
    """Arrays and generators as lists, numbers of any library as Python's."""
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
    """A text, or what stands for a chat: the same beginning as that of any turn before."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(item, Mapping) for item in prompt):
        return None
    return "".join(f"{message.get('role')}\n{message.get('content')}\n" for message in prompt)
