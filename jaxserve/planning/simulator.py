"""A whole workload on the simulated executor: the real scheduler and engine, a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from tqdm import tqdm

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.recorder import RequestRecord, StepRecord
from jaxserve.engine.requests import RequestBuilder
from jaxserve.engine.simulated import SimulatedExecutor
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.step_cost import StepCost
from jaxserve.scheduling.policy import Policy
from jaxserve.workload import WorkloadItem

_ANY_TOKEN = 2**31


@final
@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What would have happened; times in virtual seconds from the start of the run.

    Attributes:
      completions: in the order of the items; their tokens mean nothing, their numbers and times do.
      wall_s: to the last end.
      steps, requests: what `jaxserve.report.Report` shows.
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
    label: str = "simulating",
    progress: bool = True,
) -> Simulation:
    """Play a workload, arrivals and all, against a policy, without a device or a model.

    Every decision is made by the code that serves on a device; only the time that passes is made
    up, by `cost`: usually a `StepTimes`.

    Args:
      predictions: of each item's output length, for policies that use them.
      label: of the progress bar.

    Raises:
      InvalidRequestError: an item that a runtime of this configuration would refuse.
    """
    clock = VirtualClock()
    executor = SimulatedExecutor(config, clock, cost=cost, reads_context=False)
    engine = Engine(executor, policy, clock)
    builder = RequestBuilder(
        None,
        eos_token_ids=(),
        vocab_size=_ANY_TOKEN,
        max_prompt_tokens=config.max_prompt_tokens,
        seed=0,
    )
    answers = [
        Answer(replace(builder.build_item(item, item.arrival_s), prediction=prediction))
        for item, prediction in zip(items, predictions or [None] * len(items), strict=True)
    ]
    arriving = deque(sorted(answers, key=lambda answer: answer.request.arrival_s))
    unsettled = list(answers)
    with tqdm(
        total=len(items), desc=label, unit="req", leave=False, delay=2, disable=not progress
    ) as bar:
        while arriving or engine.has_work:
            if not _take_in(engine, arriving, clock.now()) and _wait(engine, arriving, clock):
                continue
            if any(news.sequence.finish_reason for news in engine.step()):
                keep = engine.recorder.request_ended
                settled = [a for a in unsettled if a.sequences and a.settle(keep)]
                unsettled = [a for a in unsettled if not a.future.done()]
                bar.update(len(settled))
    engine.stats.end_busy_period()
    completions = tuple(answer.future.result() for answer in answers)
    return Simulation(
        completions=completions,
        wall_s=max((c.timing.finished_s or 0.0 for c in completions), default=0.0),
        steps=engine.recorder.steps,
        requests=engine.recorder.requests,
        stats=engine.stats,
    )


def _take_in(engine: Engine, arriving: deque[Answer], now_s: float) -> bool:
    """Hand over those that have arrived by now; whether there were any."""
    has_news = False
    while arriving and arriving[0].request.arrival_s <= now_s:
        answer = arriving.popleft()
        answer.sequences = engine.add(answer.request)
        has_news = True
    return has_news


def _wait(engine: Engine, arriving: deque[Answer], clock: VirtualClock) -> bool:
    """Let time pass to the next arrival or the policy's own wake-up, if nothing is to be done."""
    wake_s = engine.idle_until_s if engine.has_work else float("inf")
    if wake_s is None or wake_s <= clock.now():
        return False
    engine.stats.end_busy_period()
    clock.advance_to(min(wake_s, arriving[0].request.arrival_s) if arriving else wake_s)
    return True
