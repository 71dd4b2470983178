"""Conversion of prompts to requests, and their submission to the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidRequestError, MissingExtraError, UnsupportedModelError
from jaxserve.core.request import Completion, Request, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Answer, PieceSink, failed_completion
from jaxserve.engine.pending import Pending, PromptBatch
from jaxserve.engine.requests import Prompt, RequestBuilder, as_batch
from jaxserve.models.thinking import Thinking
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.adapters import Adapters
from jaxserve.runtime.forecaster import AwaitedPrediction, Forecaster
from jaxserve.runtime.replicas import Replicas
from jaxserve.scheduling.presets import check_heeded
from jaxserve.workload import WorkloadItem


@final
class Intake:
    """A thread-safe submitter of requests, which tokenizes on the calling thread."""

    def __init__(
        self,
        requests: RequestBuilder,
        replicas: Replicas,
        tokenizer: Tokenizer | None,
        clock: Clock,
        adapters: Adapters,
        forecaster: Forecaster | None = None,
    ):
        self._requests = requests
        self._adapters = adapters
        self._forecaster = forecaster
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._clock = clock

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        on_piece: PieceSink | None = None,
        **others: Any,
    ) -> Pending[Completion]:
        """Submit one request; `others` are arguments of `RequestBuilder.build`."""
        now = self._clock.now()
        request = self._requests.build(
            prompt,
            params or SamplingParams(),
            now,
            **others,
        )
        with ExitStack() as if_refused:
            pending = self._hand_over([self._accepted(request, if_refused)], on_piece)
            if_refused.pop_all()
        return pending[0]

    def submit_items(self, items: Sequence[WorkloadItem]) -> list[Pending[Completion]]:
        now = self._clock.now()
        with ExitStack() as if_refused:
            built = [self._requests.build_item(item, now) for item in items]
            pending = self._hand_over([self._accepted(each, if_refused) for each in built])
            if_refused.pop_all()
        return pending

    def submit_batch(self, batch: PromptBatch) -> list[Pending[Completion]]:
        """Submit every prompt that can be served; a replica's requests start in one iteration.

        The other prompts get requests that have ended with an error. Raises InvalidRequestError on
        an engine's thread, and QueueFullError if more requests than `max_waiting` would wait; then
        none is submitted.
        """
        self._replicas.check_may_wait()
        refused: dict[int, Pending[Completion]] = {}
        requests = []
        with ExitStack() as if_refused:
            for index, (prompt, params) in enumerate(zip(batch.prompts, batch.params, strict=True)):
                now = self._clock.now()
                try:
                    built = self._requests.build(prompt, params, now)
                    requests.append(self._accepted(built, if_refused))
                except (InvalidRequestError, MissingExtraError) as error:
                    timing = Timing(arrival_s=now, finished_s=now)
                    refused[index] = Pending.ended(failed_completion("refused", (), error, timing))
            accepted = iter(self._hand_over(requests))
            if_refused.pop_all()
        return [refused.get(i) or next(accepted) for i in range(len(batch.prompts))]

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return self._requests.prompt_tokens(prompt)

    def pooled_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt whose states are pooled."""
        return self._requests.prompt_tokens(prompt, pools=True)

    def encode(self, prompts: Any) -> Any:
        replicas = self._replicas.all
        config = replicas[0].executor.config
        if not config.has_encoder:
            raise UnsupportedModelError(
                "this model has no encoder; encode() is for encoder-decoder models such as T5"
            )
        self._replicas.check_leads()
        self._replicas.check_awake()
        self._replicas.check_may_wait()
        batch, single = as_batch(prompts)
        tokens = [self._requests.prompt_tokens(prompt) for prompt in batch]
        found = []
        # One step at a time, so that running requests continue in between.
        for index, some in enumerate(in_steps(tokens, config.max_step_tokens)):
            replica = replicas[index % len(replicas)]
            found += replica.loop.ask(partial(replica.executor.encode, some))
        return found[0] if single else found

    def _accepted(self, request: Request, if_refused: ExitStack) -> Request:
        """Return a request with its adapter, acquired until the request has ended or is refused."""
        check_heeded(request, self._replicas.first.engine.scheduler.policy)
        if request.params.adapter is None:
            return request
        slot = self._adapters.acquire(request.params.adapter)
        if_refused.callback(self._adapters.release, slot)
        return replace(request, adapter=slot)

    def _hand_over(
        self, requests: Sequence[Request], on_piece: PieceSink | None = None
    ) -> list[Pending[Completion]]:
        # Claimed first, so that no refused request is predicted.
        with self._replicas.claimed(requests) as claimed:
            answers = self._submit(requests, claimed, on_piece)
        for answer in answers:
            if answer.request.adapter is not None:
                self._adapters.release_after(answer)
        return [Pending(a.request.id, a.future, self._replicas.cancel) for a in answers]

    def _submit(
        self, requests: Sequence[Request], claimed: set[str], on_piece: PieceSink | None
    ) -> list[Answer]:
        forecaster = self._forecaster
        if forecaster is None or all(request.params.only_scores for request in requests):
            return self._answers(requests, claimed, on_piece)
        asked = forecaster.ask(requests)
        try:
            answers = self._answers(forecaster.wait_for(asked), claimed, on_piece)
        except BaseException:
            forecaster.drop(*asked)
            raise
        for awaited, answer in zip(asked, answers, strict=True):
            awaited.submitted(partial(self._replicas.expect, answer))
            answer.future.add_done_callback(partial(_drop, forecaster, awaited))
        return answers

    def _answers(
        self, requests: Sequence[Request], claimed: set[str], on_piece: PieceSink | None
    ) -> list[Answer]:
        answers = [self._answer(request, on_piece) for request in requests]
        self._replicas.submit_claimed(claimed, *answers)
        return answers

    def _answer(self, request: Request, on_piece: PieceSink | None) -> Answer:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return Answer(request, sink=on_piece)
        skip = request.params.skip_special_tokens
        # A decoder's answer continues the prompt's text; an encoder-decoder's is a new text.
        after = () if request.num_encoded else request.prompt
        thinking = request.thinking
        shown = thinking.shown if isinstance(thinking, Thinking) else ()
        return Answer(
            request,
            decoder=lambda: tokenizer.stream_decoder(skip, after=after, shown=shown),
            sink=on_piece,
        )


def _drop(forecaster: Forecaster, awaited: AwaitedPrediction, _: Future[Completion]) -> None:
    forecaster.drop(awaited)


def in_steps(
    prompts: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[Sequence[Sequence[int]]]:
    """Yield batches of consecutive prompts with at most `max_tokens` tokens each."""
    start, num_tokens = 0, 0
    for index, prompt in enumerate(prompts):
        if num_tokens + len(prompt) > max_tokens:
            yield prompts[start:index]
            start, num_tokens = index, 0
        num_tokens += len(prompt)
    if prompts:
        yield prompts[start:]
