"""Where prompts come in: made into requests, handed to the replicas, promised an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidRequestError
from jaxserve.core.request import Completion, Request, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Answer, Piece, PieceSink, failed_completion
from jaxserve.engine.requests import Prompt, RequestBuilder
from jaxserve.runtime.batches import Batch
from jaxserve.runtime.forecaster import Forecaster
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.replicas import Replicas
from jaxserve.runtime.streams import Start, aread, read
from jaxserve.runtime.turns import aturn_answer, turn_answer
from jaxserve.workload import WorkloadItem


@final
class Intake:
    """Thread-safe; tokenizes on the thread that asks, never on an engine's.

    Args:
      requests: checks them against the model's limits.
      tokenizer: of the answers' text; None leaves them without.
      forecaster: None leaves requests without predictions of their lengths.
      progress: show a bar while `answer` waits.
    """

    def __init__(
        self,
        requests: RequestBuilder,
        replicas: Replicas,
        tokenizer: Any,
        clock: Clock,
        forecaster: Forecaster | None = None,
        *,
        progress: bool = False,
    ):
        self._requests = requests
        self._progress = progress
        self._forecaster = forecaster
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._clock = clock

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        deadline_s: float | None = None,
        sink: PieceSink | None = None,
        **others: Any,
    ) -> Pending:
        """See `Runtime.submit`; `others` as `RequestBuilder.build` has them."""
        now = self._clock.now()
        request = self._requests.build(
            prompt,
            params or SamplingParams(),
            now,
            deadline_s=None if deadline_s is None else now + deadline_s,
            **others,
        )
        return self._hand_over([request], sink)[0]

    def submit_items(self, items: Sequence[WorkloadItem]) -> list[Pending]:
        """See `Runtime.submit_items`."""
        now = self._clock.now()
        return self._hand_over([self._requests.build_item(item, now) for item in items])

    def submit_batch(self, batch: Batch) -> list[Pending]:
        """Requests that cannot be served have ended with their errors; the rest start together."""
        self._replicas.check_may_wait()
        refused: dict[int, Pending] = {}
        requests = []
        for index, (prompt, params) in enumerate(zip(batch.prompts, batch.params, strict=True)):
            now = self._clock.now()
            try:
                requests.append(self._requests.build(prompt, params, now))
            except InvalidRequestError as error:
                timing = Timing(arrival_s=now, finished_s=now)
                refused[index] = Pending.ended(failed_completion("refused", (), error, timing))
        accepted = iter(self._hand_over(requests))
        return [refused.get(i) or next(accepted) for i in range(len(batch.prompts))]

    @property
    def max_prompt_tokens(self) -> int:
        """Of a prompt that leaves room for one output token."""
        return self._requests.max_prompt_tokens

    def answer(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        """Wait for an answer, with its error if it fails; see `turn_answer`."""
        self._replicas.check_may_wait()
        pending = self.submit(prompt, params, conversation_id=conversation_id)
        return turn_answer(pending, conversation_id, timeout_s, progress=self._progress)

    async def aanswer(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        """`answer` for asyncio; cancelling the task ends the request."""
        pending = self.submit(prompt, params, conversation_id=conversation_id)
        return await aturn_answer(pending, conversation_id, timeout_s)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        conversation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[Piece]:
        """See `Runtime.stream`.

        Raises:
          TimeoutError: the last piece was not there in `timeout_s` seconds.
        """
        self._replicas.check_may_wait()
        params = params or SamplingParams()
        return read(self._start(prompt, params, conversation_id), params.n, timeout_s)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        conversation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        params = params or SamplingParams()
        return aread(self._start(prompt, params, conversation_id), params.n, timeout_s)

    def _start(self, prompt: Prompt, params: SamplingParams, conversation_id: str | None) -> Start:
        return lambda sink: self.submit(prompt, params, conversation_id=conversation_id, sink=sink)

    def _hand_over(
        self, requests: Sequence[Request], sink: PieceSink | None = None
    ) -> list[Pending]:
        """All start in the same iteration."""
        answers = [self._answer(request, sink) for request in self._predicted(requests)]
        self._replicas.submit(*answers)
        return [self._pending(answer) for answer in answers]

    def _predicted(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests if self._forecaster is None else self._forecaster.with_predictions(requests)

    def _answer(self, request: Request, sink: PieceSink | None) -> Answer:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return Answer(request, sink=sink)
        skip = request.params.skip_special_tokens
        return Answer(request, decoder=lambda: tokenizer.stream_decoder(skip), sink=sink)

    def _pending(self, answer: Answer) -> Pending:
        return Pending(answer.request.id, answer.future, self._replicas.cancel)
