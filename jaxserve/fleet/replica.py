"""The protocol between a fleet and its replicas, and the calls that it sends to them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import PieceSink
from jaxserve.engine.loop import Running
from jaxserve.models.config import DecoderConfig
from jaxserve.runtime import RuntimeStats
from jaxserve.runtime.weight_update import WeightUpdate
from jaxserve.scheduling.router import page_hashes

# Characters of English text per token for the vocabularies of the registered models. Only replicas
# tokenize.
_CHARACTERS_A_TOKEN = 4

# "whole" computes prompts and answers. "prefill" computes prompts, whose KV goes to a "decode"
# replica, which computes the answers.
Role = Literal["whole", "prefill", "decode"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaCall:
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


def pays(call: ReplicaCall, num_cached: int, page_size: int) -> bool:
    """Return whether a prefill replica should compute the prompt of a call.

    It should not if the prompt has no full page, if an answering replica has half of its pages
    (`num_cached` leading ones), if its log-probabilities or pooled states are wanted, or if the
    request has a latency bound of its own.
    """
    params = call.params
    if params.only_scores or params.prompt_logprobs is not None or params.bounds:
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
) -> ReplicaCall:
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
    return ReplicaCall(
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


def cancelled_completion(call: ReplicaCall, arrival_s: float) -> Completion:
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


@final
@dataclass(frozen=True, kw_only=True)
class Started:
    """The facts about a replica that serves: its process, its machine, its limits in tokens.

    `num_host_pages` are pages of host memory, through which KV goes to another replica.
    """

    pid: int
    host: str
    max_context: int
    max_length: int
    max_prompt_tokens: int
    model_config: DecoderConfig
    num_host_pages: int


@final
@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state of one replica.

    Attributes:
      role: see `Role`.
      started: facts about its process; None while it loads, or if it could not be replaced.
      error: reason why it could not be replaced; None otherwise.
      num_unfinished: number of its requests that have not ended.
      work: expected tokens of these requests, by the router's estimate.
      num_deaths: number of its processes that have died.
      weights_version: version of its current weights; see `Fleet.update_params`.
    """

    role: Role
    started: Started | None
    error: JaxserveError | None
    num_unfinished: int
    work: int
    num_deaths: int
    weights_version: int


class ReplicaProcess(Protocol):
    """A runtime in a process that may die. Its constructor does not wait for the process.

    Every coroutine raises `ReplicaDiedError` if the process has died or can no longer serve.
    """

    async def start(self) -> Started:
        """Load the model, and compile what a first request needs.

        It raises the errors of `Runtime.from_pretrained`.
        """
        ...

    async def prefill(self, call: ReplicaCall) -> Any:
        """Compute a prompt, and return where the KV of its full pages is, for `answer`.

        Return None without KV, for instance if the prompt cannot be served; `answer` says why.
        """
        ...

    async def answer(
        self, call: ReplicaCall, on_piece: PieceSink | None = None, kv: Any = None
    ) -> Completion:
        """Return the completion, which has an error if the request cannot be served.

        Args:
          on_piece: called with the pieces, from the first token on, before the completion.
          kv: what `prefill` of another replica returned, which is consumed. Parts that cannot be
            read are computed.

        Raises:
          InvalidRequestError: the prompt cannot be sent to the process.
          EngineFailedError: the request failed, but the replica still serves.
        """
        ...

    async def stats(self) -> RuntimeStats:
        """Return the counters of the process."""
        ...

    async def prepare_params(self, source: Any, *, partial: bool) -> None:
        """Check new weights, and load them next to the current ones; requests run meanwhile.

        Args:
          source: a path, or the form in which the maker of the replica sends parameters.
          partial: see `Runtime.update_params`.

        Raises:
          JaxserveError: the process cannot take them, and serves as before.
        """
        ...

    async def drop_prepared(self) -> None:
        """Drop the weights that `prepare_params` has loaded."""
        ...

    async def update_params(self, update: WeightUpdate) -> None:
        """Switch to the weights that `prepare_params` has loaded.

        Raises:
          JaxserveError: the process computes with the former ones.
        """
        ...

    async def pause(self, running: Running) -> None:
        """Run no step until `resume`, as `Runtime.pause` does."""
        ...

    async def resume(self) -> None:
        """Run steps again after `pause`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Make `answer` return a completion with the tokens so far. It neither waits nor raises."""
        ...

    def kill(self) -> None:
        """End the process if it has not ended. It does not raise."""
        ...
