"""No policy starves a request, whatever number and kind of requests come after it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import END_TOKEN
from jaxserve.scheduling.admission import MaxLength, OnDemand, Oracle, Predicted
from jaxserve.scheduling.iteration.continuous import IterationLevel, Unified
from jaxserve.scheduling.ltr import LearningToRank
from jaxserve.scheduling.mlfq import FeedbackQueues
from jaxserve.scheduling.order import LongestFirst, Priority, ShortestPredictedFirst
from jaxserve.scheduling.policy import Policy, ServiceOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless
from jaxserve.scheduling.seer import SiblingLengths
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.scheduling.slos_serve import SoftAdmission
from jaxserve.scheduling.tie import TailInflated
from jaxserve.scheduling.trail import LimitedPreemption
from jaxserve.scheduling.uniboost import Boosted
from jaxserve.testing import Trace
from tests.common.tiers import some

pytestmark = pytest.mark.fast

AGEING_S = 0.02
HIGHEST = 3
MIXED = (
    Policy("on_demand_orca", OnDemand(0.0), Priority(AGEING_S), IterationLevel(), Stateless()),
    Policy("small_chunks", OnDemand(0.0), Priority(AGEING_S), Unified(chunk_tokens=2), Stateless()),
)
# A reserved token is a head start; with this rate no head start exceeds about AGEING_S.
PACKED = {
    name: replace(
        PRESETS[name],
        order=LongestFirst(PRESETS[name].admission, ageing_s=AGEING_S / 100, max_passes=3),
    )
    for name in ("s3", "s3_oracle")
}
# With these rates, too, a sequence is overtaken only by those that come less than AGEING_S later.
REORDERED = {
    name: replace(PRESETS[name], order=order)
    for name, order in {
        "shortest_predicted": ShortestPredictedFirst(ageing_s=AGEING_S / 100),
        "tie": TailInflated(decay_s=AGEING_S / 60),
        "uniboost": Boosted(10 / AGEING_S, prompt_token_s=AGEING_S / 100, token_s=AGEING_S / 100),
    }.items()
}
BY_SERVICE = {
    "mlfq": replace(PRESETS["mlfq"], order=FeedbackQueues(quantum=2, promotes_s=AGEING_S / 10)),
    "vtc": PRESETS["vtc"],
    "ltr": replace(PRESETS["ltr"], order=LearningToRank(starves=20, period=5)),
    "trail": replace(PRESETS["trail"], order=LimitedPreemption(ageing_s=AGEING_S / 100)),
    "seer": replace(PRESETS["seer"], order=SiblingLengths(ageing_s=AGEING_S / 100)),
    "slos_serve": replace(PRESETS["slos_serve"], order=SoftAdmission(max_wait_s=AGEING_S)),
}
# By priority, these equal other presets.
EQUAL = {"flover", "exegpt", "exegpt_waa_m", "shortest_predicted", "tie", "vtc"}
EQUAL |= {"cache_ttl", "ltr", "trail", "seer", "slos_serve"}
POLICIES = [
    *{**PRESETS, **PACKED, **REORDERED, **BY_SERVICE}.values(),
    *(
        replace(PRESETS[name], name=f"{name}, by priority", order=Priority(AGEING_S))
        for name in sorted(PRESETS.keys() - EQUAL)
    ),
    *MIXED,
]
AGED = (Priority, LongestFirst, ShortestPredictedFirst, TailInflated, Boosted)
KINDS = ("one token", "long", "big", "mixed")


class Overload:
    """A stream of requests that keeps more requests waiting than can run."""

    def __init__(self, seed: int, kind: str, policy: Policy, probe: str | None = None):
        self.trace = Trace(seed, probe=probe)
        self.config = self.trace.config
        self.clock = VirtualClock()
        self.engine: Engine = self.trace.engine(policy, clock=self.clock)
        self.all: list[Sequence] = []
        self._later: list[Sequence] = []
        self._kind = kind
        self._max_passes = policy.order.max_passes
        self._rng = random.Random(f"{seed} {kind}")
        self._numbers = itertools.count()
        # All have the same urgency, so that early ones do not fill the queue permanently.
        self._priority = self._rng.choice([0, HIGHEST])
        self._patience_s = self._rng.choice([-1e6, 0.0, AGEING_S / 2, 1e6])
        self._longest = (
            min(self.config.max_context, (self.config.num_pages - 1) * self.config.page_size) - 1
        )

    def add(self, request: Request) -> list[Sequence]:
        """Add a request that arrives now."""
        sequences = self.engine.add(replace(request, arrival_s=self.clock.now()))
        self.all += sequences
        return sequences

    def step(self) -> None:
        """Run one step, with twice as many later requests waiting as there are slots."""
        waiting = [s for s in self._later if s.phase is Phase.WAITING]
        while len(waiting) < 2 * self.config.max_slots:
            waiting += self.add(self._competitor())
        self._later = waiting
        self.engine.step()
        if self.engine.idle_until_s is not None:
            self.clock.advance_to(self.engine.idle_until_s)

    def stall_steps(self) -> int:
        """Return how many steps the first request may wait: a prompt and a turn of all others."""
        chunks = -(-self.config.max_context // self.config.max_step_tokens)
        return self.config.max_slots * (1 + chunks)

    def steps_for(self, ahead: list[Sequence]) -> int:
        """Return the steps for all tokens of these sequences, after all that may run before."""
        running = self.config.max_slots * self.config.max_context
        passed = self._max_passes * len(ahead) * self.config.max_context
        return self.stall_steps() * (running + passed + sum(s.max_length for s in ahead))

    def _competitor(self) -> Request:
        rng = self._rng
        kind = rng.choice(KINDS[:3]) if self._kind == "mixed" else self._kind
        prompt = self._longest if kind == "big" else rng.randint(1, min(6, self._longest))
        longest_answer = {"one token": 1, "long": None, "big": rng.choice([1, None])}[kind]
        number = next(self._numbers)
        return Request(
            id=f"later {number}",
            prompt=(1,) * prompt,
            params=SamplingParams(max_tokens=longest_answer, tenant="later"),
            arrival_s=0.0,
            stop_token_ids=rng.choice([(), (END_TOKEN,)]),
            seed=number,
            priority=self._priority,
            deadline_s=self.clock.now() + self._patience_s,
        )


def _overload(policy: Policy, seed: int, kind: str, probe: str | None = None) -> int:
    """Run an overload until its victims have ended; return the number of preemptions."""
    load = Overload(seed, kind, policy, probe)
    victims = [s for request in load.trace.requests for s in load.add(request)]
    if isinstance(policy.order, AGED):
        # Every later request comes after all victims.
        while load.clock.now() < (1 + HIGHEST) * AGEING_S:
            load.step()
        ahead = [s for s in load.all if s.phase is not Phase.FINISHED and s not in victims]
    else:
        ahead = []
    lengths = load.engine.scheduler.lengths
    if not isinstance(policy.order, ServiceOrder):
        victims.sort(key=lambda victim: policy.order.key(victim, lengths))
    num_steps = 0
    for victim in victims:
        ahead.append(victim)
        most = load.steps_for(ahead)
        while victim.phase is not Phase.FINISHED:
            assert num_steps < most, f"seed {seed}, {kind}: {victim.request.id} starves"
            load.step()
            num_steps += 1
    return load.engine.scheduler.counters()["num_preemptions"]


@pytest.mark.parametrize("policy", some(POLICIES, len(PRESETS)), ids=lambda policy: policy.name)
def test_no_request_starves(policy: Policy):
    """Each ends within a number of steps that depends on the work ahead of it."""
    num_preemptions = 0
    for seed in range(3):
        for kind in KINDS:
            num_preemptions += _overload(policy, seed, kind)
    if isinstance(policy.admission, (MaxLength, Oracle)):
        assert num_preemptions == 0
    elif isinstance(policy.admission, (OnDemand, Predicted)):
        assert num_preemptions > 0


@pytest.mark.parametrize("probe", some(["any", "shortest"]))
@pytest.mark.parametrize(
    "policy", some([PACKED["s3"], PRESETS["auto"]]), ids=lambda policy: policy.name
)
def test_no_request_starves_whatever_a_probe_reads(policy: Policy, probe: str):
    """This holds although readings change reservations and places in the order at preemptions."""
    num_preemptions = sum(
        _overload(policy, seed, kind, probe) for seed in range(2) for kind in KINDS
    )
    assert num_preemptions > 0


IN_ORDER = sorted(PRESETS.keys() - PACKED.keys() - REORDERED.keys() - BY_SERVICE.keys())


@pytest.mark.parametrize("name", some(IN_ORDER, 4))
def test_a_big_prompt_is_not_overtaken(name: str):
    """Small requests that would fit wait behind a big one that does not fit."""
    for seed in range(5):
        load = Overload(seed, "mixed", PRESETS[name])
        for _ in range(300):
            load.step()
        begun = [s.times.admitted_s for s in load.all if s.times.admitted_s is not None]
        assert len(begun) > 1 and begun == sorted(begun), f"seed {seed}"
        assert all(s.times.admitted_s is not None for s in load.all[: len(begun)]), f"seed {seed}"
