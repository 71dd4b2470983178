"""The loop that runs an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Completion, Request
from jaxserve.engine.answers import Answer
from jaxserve.engine.device_loop import DeviceLoop, DeviceWork, Running
from jaxserve.engine.engine import Engine
from jaxserve.engine.recorder import RequestLog, record_end
from jaxserve.scheduling.scheduler import Progress
from jaxserve.scheduling.sequence import Phase

# A thread that runs an engine, and ends answers.
EngineLoop: TypeAlias = DeviceLoop[Answer]


def engine_loop(engine: Engine, clock: Clock, logs: Sequence[RequestLog] = ()) -> EngineLoop:
    """Start the thread of an engine.

    Args:
      logs: get every request that began and ended, unless the loop itself failed.
    """
    return DeviceLoop(_EngineWork(engine, clock, logs), clock, name="jaxserve-engine")


@final
class _EngineWork(DeviceWork[Answer]):
    """The work of an engine's loop: answers, which the engine's steps advance."""

    memory_remedy = "pass a smaller kv_memory, max_step_tokens or max_slots"

    def __init__(self, engine: Engine, clock: Clock, logs: Sequence[RequestLog]):
        self.changed = engine.changed
        self._engine = engine
        self._clock = clock
        self._logs = logs
        # Whether there may be work for idle time.
        self._may_use_idle_time = False
        self._answers: dict[str, Answer] = {}
        self._by_sequence: dict[int, Answer] = {}

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def idle_until_s(self) -> float | None:
        return self._engine.idle_until_s

    def begin(self, job: Answer) -> None:
        self._answers[job.request.id] = job
        job.begin(self._engine.add(job.request), self._engine.weights)
        self._by_sequence.update((s.key, job) for s in job.sequences)
        for sequence in job.sequences:
            if sequence.output:  # forced by a grammar before any step
                job.deliver(sequence, self._engine.scheduler)
        self._settle(job)

    def step(self) -> None:
        self._deliver(self._engine.step())
        self._may_use_idle_time = True

    @property
    def has_idle_work(self) -> bool:
        return self._may_use_idle_time

    def use_idle_time(self) -> None:
        self._engine.stats.end_busy_period()
        self._may_use_idle_time = self._engine.use_idle_time()

    def rest(self) -> None:
        self._engine.stats.end_busy_period()

    def make_room(self, running: Running) -> None:
        if running == "finish":
            return
        self._deliver(self._engine.drain())
        if running == "restart":
            for answer in self._answers.values():
                self._restart(answer)
        elif running == "abort":
            for request_id in list(self._answers):
                self.cancel(request_id)

    def settle(self) -> None:
        for answer in list(self._answers.values()):
            answer.go_on_with(self._engine.weights, self._engine.scheduler)
            self._settle(answer)

    def cancel(self, id: str) -> None:
        answer = self._answers.get(id)
        if answer is not None:
            for sequence in answer.sequences:
                self._engine.scheduler.end(sequence, "cancelled")
            self._settle(answer)

    def cancel_all(self) -> None:
        for request_id in list(self._answers):
            self.cancel(request_id)

    def fail_all(self, error: JaxserveError, not_begun: Sequence[Answer]) -> None:
        # An answer that failed to begin may be in both.
        remaining = self._answers | {answer.request.id: answer for answer in not_begun}
        for answer in remaining.values():
            answer.fail(error, self._clock.now())
        self._engine.abandon()

    def _deliver(self, all_news: Iterable[Progress]) -> None:
        scheduler = self._engine.scheduler
        touched: dict[str, Answer] = {}
        # First tokens go first: a user waits for each, and may not notice a later one's delay.
        for news in sorted(all_news, key=lambda each: len(each.sequence.output) > each.num_new):
            answer = self._by_sequence[news.sequence.key]
            answer.deliver(news.sequence, scheduler)
            touched[answer.request.id] = answer
        for answer in touched.values():
            self._settle(answer)

    def _restart(self, answer: Answer) -> None:
        keeps_output = answer.has_shown or any(
            sequence.phase is Phase.FINISHED for sequence in answer.sequences
        )
        for sequence in answer.sequences:
            self._engine.scheduler.restart(sequence, keeps_output=keeps_output)
        if not keeps_output:
            answer.restart()

    def _settle(self, answer: Answer) -> None:
        if answer.settle(self._keep):
            for sequence in answer.sequences:
                del self._by_sequence[sequence.key]
            del self._answers[answer.request.id]

    def _keep(self, request: Request, completion: Completion) -> None:
        record_end(self._engine.stats, self._engine.recorder, request, completion)
        for log in self._logs:
            log.append(request, completion)
