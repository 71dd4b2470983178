"""Simulation of a workload: the real scheduler and engine, a simulated executor and clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, final

from tqdm import tqdm

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion, EncoderPrompts, Request
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.recorder import EngineStats, RequestRecord, StepRecord
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.execution.step_cost import StepCost
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.policy import Policy
from jaxserve.workload import WorkloadItem
from jaxserve.workload.conversations import FollowUp

_ANY_TOKEN = 2**31


# A request that has ended, and its answer.
Ended: TypeAlias = tuple[Request, Completion]


class Pilot(Protocol):
    """An object that may change the schedule of a simulated engine between steps."""

    def after_step(self, engine: Engine, ended: Sequence[Ended], now_s: float) -> None:
        """Act between two steps; `ended` are the requests that the last step ended."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of a simulation. Times are virtual seconds from the start of the run.

    Attributes:
      completions: finished requests: first the items in their order, then the follow-ups. The
        values of their tokens have no meaning.
      wall_s: end of the last request.
      steps, requests: the records for a `jaxserve.report.Report`.
      stats: the engine's counters.
    """

    completions: tuple[Completion, ...]
    wall_s: float
    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]
    stats: EngineStats


def simulate(
    items: Sequence[WorkloadItem],
    policy: Policy,
    config: EngineConfig,
    cost: StepCost,
    *,
    predictions: Sequence[LengthPrediction | None] | None = None,
    follow_up: FollowUp | None = None,
    predict: Callable[[WorkloadItem], LengthPrediction | None] = lambda _: None,
    pilot: Pilot | None = None,
    chunk_cost: RecomputeCost | None = None,
    swap_costs: SwapCosts | None = None,
    until_s: float = math.inf,
    label: str = "simulating",
    progress: bool = True,
) -> Simulation:
    """Simulate a workload with its arrivals under a policy, without a device or a model.

    The code that serves on a device makes every decision. Only the duration of steps comes from
    `cost`, usually a `StepTimes`.

    Args:
      predictions: the items' predicted output lengths, for policies that use them.
      follow_up: returns the next request after an answer; by default there is none.
      predict: returns the predicted output length of such a request; by default there is none.
      pilot: changes the schedule between steps; by default nothing does.
      chunk_cost: cost of recomputing a page, which gives cached pages their value; by default a
        guess.
      swap_costs: the swap costs that a device would measure at its start; by default a preempted
        sequence is always swapped.
      until_s: virtual time at which to stop, even if requests are unfinished.
      label: label of the progress bar.

    Raises:
      InvalidRequestError: a runtime of this configuration would refuse an item.
    """
    engine, clock, builder = simulated_engine(policy, config, cost, swap_costs=swap_costs)
    if chunk_cost is not None:
        engine.value_by(chunk_cost)
    clients = _Clients(builder, follow_up, predict)
    for item, prediction in zip(items, predictions or [None] * len(items), strict=True):
        clients.ask(item, prediction)
    with tqdm(
        total=len(items), desc=label, unit="req", leave=False, delay=2, disable=not progress
    ) as bar:
        while clock.now() < until_s and (clients.next_arrival_s < math.inf or engine.has_work):
            is_news = clients.hand_in(engine, clock.now()) and not engine.plans_late
            if not is_news and _wait(engine, clients, clock):
                continue
            ended: list[Ended] = []
            if any(news.sequence.finish_reason for news in engine.step()):
                ended = clients.take_answers(engine.on_ended)
                bar.update(len(ended))
                bar.total = len(clients.answers)
            if pilot is not None:
                pilot.after_step(engine, ended, clock.now())
    engine.stats.end_busy_period()
    futures = [answer.future for answer in clients.answers]
    completions = tuple(future.result() for future in futures if future.done())
    return Simulation(
        completions=completions,
        wall_s=max((c.timing.finished_s or 0.0 for c in completions), default=0.0),
        steps=engine.recorder.steps,
        requests=engine.recorder.requests,
        stats=engine.stats,
    )


def simulated_engine(
    policy: Policy, config: EngineConfig, cost: StepCost, *, swap_costs: SwapCosts | None = None
) -> tuple[Engine, VirtualClock, RequestBuilder]:
    """Return an engine on a simulated device, its clock, and the builder of its requests."""
    clock = VirtualClock()
    executor = SimulatedExecutor(
        config, clock, cost=cost, swap_costs=swap_costs, reads_context=False
    )
    builder = RequestBuilder(
        None,
        eos_token_ids=(),
        vocab_size=_ANY_TOKEN,
        max_prompt_tokens=lambda: config.max_prompt_tokens,
        encoder=EncoderPrompts(start_token_id=0, page_size=config.page_size)
        if config.has_encoder
        else None,
        seed=0,
    )
    return Engine(executor, policy, clock), clock, builder


def _wait(engine: Engine, clients: _Clients, clock: VirtualClock) -> bool:
    """If the engine is idle, advance to the next arrival or wake-up; return whether it was."""
    wake_s = engine.idle_until_s if engine.has_work else math.inf
    if wake_s is None or wake_s <= clock.now():
        return False
    engine.rest()
    clock.advance_to(min(wake_s, clients.next_arrival_s))
    return True


@final
class _Clients:
    def __init__(
        self,
        builder: RequestBuilder,
        follow_up: FollowUp | None,
        predict: Callable[[WorkloadItem], LengthPrediction | None],
    ):
        self.answers: list[Answer] = []
        self._builder = builder
        self._follow_up = follow_up
        self._predict = predict
        self._arriving: list[tuple[float, int]] = []
        self._unsettled: dict[int, Answer] = {}

    @property
    def next_arrival_s(self) -> float:
        return self._arriving[0][0] if self._arriving else math.inf

    def ask(self, item: WorkloadItem, prediction: LengthPrediction | None = None) -> None:
        request = self._builder.build_item(item, item.arrival_s)
        heapq.heappush(self._arriving, (item.arrival_s, len(self.answers)))
        self.answers.append(Answer(replace(request, prediction=prediction)))

    def hand_in(self, engine: Engine, now_s: float) -> bool:
        """Add the requests that have arrived to the engine; return whether there were any."""
        has_news = False
        while self.next_arrival_s <= now_s:
            index = heapq.heappop(self._arriving)[1]
            answer = self._unsettled[index] = self.answers[index]
            answer.begin(engine.add(answer.request), engine.weights)
            has_news = True
        return has_news

    def take_answers(self, keep: Callable[[Request, Completion], None]) -> list[Ended]:
        ended: list[Ended] = []
        settled = [index for index, answer in self._unsettled.items() if answer.settle(keep)]
        for index in settled:
            answer = self._unsettled.pop(index)
            completion = answer.future.result()
            ended.append((answer.request, completion))
            ended_s = completion.timing.finished_s
            if self._follow_up is None or ended_s is None:
                continue
            item = self._follow_up(index, completion, ended_s)
            if item is not None:
                self.ask(item, self._predict(item))
        return ended
