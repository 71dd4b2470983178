"""Random traces on the simulated executor, with every invariant checked after each step."""

from __future__ import annotations

import math
import random
from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import GrammarTooComplexError
from jaxserve.core.page_layout import page_layout
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Weights
from jaxserve.engine.constraints import AnswerMatcher
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import END_TOKEN, Accepted, SimulatedExecutor
from jaxserve.memory.disk_tier import DiskTier
from jaxserve.predictor import LengthBuckets, Refinement
from jaxserve.scheduling.plan import TokenMasks
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.sequence import Phase, Sequence

BUCKETS = LengthBuckets.equal_width(40, 4)

# Maximum number of successive steps, per device group and link, in which no sequence advances.
MAX_IDLE_STEPS = 4
# Maximum number of times in a row that a policy may leave the device idle on purpose.
MAX_WAITS = 100
PROBED = LengthBuckets.logarithmic(30, 5)
REFINEMENT = Refinement(
    buckets=PROBED, marginal=np.full(PROBED.num, 1 / PROBED.num), belief_weight=0.5, interval=3
)
# By seed, kind of trace, request id and prompt: see `Trace.expected`.
_alone: dict[tuple[object, ...], dict[tuple[str, int], Outcome]] = {}
# Kinds of a probe's readings. `Trace(probe="any")` draws one of these for each reading.
PROBES = ("truth", "shortest", "longest", "nan")


def random_config(rng: random.Random) -> EngineConfig:
    """Return a small machine: 1 to 9 slots, 6 to 60 pages of 1 to 8 tokens."""
    max_slots = rng.randint(1, 9)
    page_size, num_pages = rng.choice([1, 2, 4, 8]), rng.randint(6, 60)
    return EngineConfig(
        page_size=page_size,
        num_pages=num_pages,
        max_slots=max_slots,
        max_context=rng.randint(20, 80),
        max_step_tokens=max_slots + rng.randint(0, 30),
        max_decode_iterations=rng.choice([1, 4, 8]),
        num_host_pages=(0, 3, 200)[num_pages % 3],
        restore=("on_admission", "prefetch")[num_pages % 2],
    )


def random_requests(rng: random.Random, config: EngineConfig) -> list[Request]:
    """Return 1 to 20 requests that fit: greedy or sampled, one or three samples, with priorities.

    Some have no length limit, and predictions of any quality; see `random_prediction`.
    """
    longest = config.max_length - 1
    requests = []
    for i in range(rng.randint(1, 20)):
        temperature = rng.choice([0.0, 1.0])
        params = SamplingParams(
            max_tokens=rng.choice([None, 1, 5, 30]),
            temperature=temperature,
            n=rng.choice([1, 1, 3]) if temperature else 1,
        )
        requests.append(
            Request(
                id=str(i),
                prompt=tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, longest))),
                params=params,
                arrival_s=float(i),
                stop_token_ids=(END_TOKEN,),
                seed=i,
                priority=rng.randrange(3),
            )
        )
    kinds = random.Random(f"predictions {len(requests)}")
    return [replace(request, prediction=random_prediction(kinds)) for request in requests]


def random_prediction(rng: random.Random) -> LengthPrediction | None:
    """Return a prediction that is missing, random, the shortest or longest, or not a number."""
    kind = rng.choice(["none", "random", "shortest", "longest", "nan"])
    weights = {
        "random": [rng.random() for _ in range(BUCKETS.num)],
        "shortest": [1.0, 0.0, 0.0, 0.0],
        "longest": [0.0, 0.0, 0.0, 1.0],
        "nan": [math.nan] * BUCKETS.num,
    }.get(kind)
    if weights is None:
        return None
    return LengthPrediction(BUCKETS, np.asarray(weights) / sum(weights))


def with_shared_prefixes(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Return the requests with new prompts, some of them equal or with a shared prefix."""
    prefixes = [request.prompt for request in requests[:3]]
    shared = []
    for request in requests:
        prefix = rng.choice(prefixes)[: rng.randint(0, 80)] if rng.random() < 0.6 else ()
        prompt = (*prefix, *request.prompt[len(prefix) :])
        shared.append(replace(request, prompt=prompt))
    return shared


def with_grammars(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Return the requests with grammars in about half of them, so that they await their tokens."""
    return [
        replace(request, params=replace(request.params, regex="a*"))
        if rng.random() < 0.5
        else request
        for request in requests
    ]


def with_pooling(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Return the requests, about half of which pool and have no output."""
    return [
        replace(request, params=SamplingParams(pools=True)) if rng.random() < 0.5 else request
        for request in requests
    ]


@final
class ForcedTokens:
    """A `GrammarSource` whose forced tokens depend on the answer's tokens only."""

    def __init__(self, seed: int):
        self._seed = seed

    def matcher(self, request: Request) -> AnswerMatcher:
        return _Matcher(self._seed)

    def masks(self, rows: tuple[int, ...], matchers: abc.Sequence[AnswerMatcher]) -> TokenMasks:
        """Return masks that allow every token; a simulation reads none."""
        words: Future[np.ndarray] = Future()
        words.set_result(np.full((len(rows), 1), 2**32 - 1, np.uint32))
        return TokenMasks(rows, words)


@final
class _Matcher:
    mask_s = 0.0
    is_complete = False

    def __init__(self, seed: int):
        self._seed = seed
        self._output: list[int] = []
        self._most = random.Random(f"{seed} binds").choice([None, None, 5])

    @property
    def is_over(self) -> bool:
        return self._most is not None and len(self._output) >= self._most

    @property
    def error(self) -> GrammarTooComplexError | None:
        return None

    def follow(self, output: abc.Sequence[int]) -> None:
        self._output = list(output)

    def forced(self) -> list[int]:
        if self.is_over:
            return []
        rng = random.Random(f"{self._seed} forced after {self._output}")
        return [rng.randrange(1, 50) for _ in range(rng.choice([0, 0, 0, 1, 2, 9]))]

    def propose(self, tokens: abc.Sequence[int], most: int, *, forces: bool) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Outcome:
    """The tokens of one sequence, how it ended, and how often it was preempted.

    `pooled` is what a request that pools returned, and None for others.
    """

    output: tuple[int, ...]
    finish_reason: str
    num_preemptions: int
    pooled: float | None = None

    def agrees_with(self, alone: Outcome) -> bool:
        """Return whether tokens and end are those of `alone`, or a prefix of them if cancelled."""
        if self.finish_reason == "cancelled":
            return self.output == alone.output[: len(self.output)]
        return replace(self, num_preemptions=0) == replace(alone, num_preemptions=0)


@final
class Trace:
    """The machine, the requests, and the simulated model's lengths and faults, all from one seed.

    The simulated model's tokens depend on every cell of the context as it is read through the page
    table. A page that is lost, overwritten or shared wrongly changes them.

    Args:
      with_faults: some sequences get logits that are not finite.
      with_conversations: requests share prefixes, and some answers are followed by a next turn.
      probe: kind of its readings, see `PROBES`; None for no probe.
      falls_short: steps deliver fewer tokens than they were planned for, sometimes none.
      has_grammars: about half of the requests await their tokens, which sometimes force others; a
        third of these await only the first five.
      pooling: about half of the requests pool in this way; None for none.
      speculates: decode loops deliver tokens that were proposed.
      incoming_pages: see `EngineConfig`.
      layer_windows: windows of layers in page groups; see `EngineConfig`.

    Attributes:
      requests: those that arrive by themselves.
      asked: all that arrived in the last run, next turns included.
      num_gaps: pages allocated ahead of computed tokens, summed over the last run's steps.
      pool_sizes: numbers of pages that the pool had in the last run.
      num_awaited: sequences that awaited pages from the host, summed over the last run's steps.
      num_moved: sequences whose pages a resize moved in the last run.
      num_reopened: closed sequences that turned out not to have ended in the last run.
      counters: of scheduling in the last run.
      num_refined: predictions that readings changed in the last run.
    """

    def __init__(
        self,
        seed: int,
        *,
        with_faults: bool = False,
        with_conversations: bool = False,
        probe: str | None = None,
        falls_short: bool = False,
        has_grammars: bool = False,
        pooling: str | None = None,
        speculates: bool = False,
        incoming_pages: int | None = None,
        layer_windows: tuple[int | None, ...] = (),
    ):
        rng = random.Random(seed)
        self.seed = seed
        self.config = replace(random_config(rng), incoming_pages=incoming_pages)
        if layer_windows:
            self.config = replace(
                self.config,
                num_pages=1 + (self.config.num_pages - 1) * page_layout(layer_windows).num_tables,
                num_host_pages=self.config.num_host_pages * page_layout(layer_windows).num_tables,
                layer_windows=layer_windows,
            )
        if speculates:
            self.config = replace(self.config, num_proposed=1 + seed % 5)
        self.requests = random_requests(rng, self.config)
        if with_conversations:
            self.requests = [
                replace(each, conversation_id=each.id if number % 2 else None)
                for number, each in enumerate(
                    with_shared_prefixes(random.Random(f"{seed} prefixes"), self.requests)
                )
            ]
        self._grammars = None
        if has_grammars:
            self._grammars = ForcedTokens(seed)
            self.requests = with_grammars(random.Random(f"{seed} grammars"), self.requests)
        if pooling is not None:
            self.config = replace(self.config, pooling=pooling)
            self.requests = with_pooling(random.Random(f"{seed} pooling"), self.requests)
        self.asked: list[Request] = []
        self.num_gaps = self.num_awaited = 0
        self.pool_sizes: set[int] = set()
        self.num_moved = 0
        self.num_refined = 0
        self._with_faults = with_faults
        self._with_conversations = with_conversations
        self._probe = probe
        self._falls_short = falls_short
        self.num_reopened = 0
        self.counters: dict[str, float] = {}
        self.num_refined = 0

    def answer_length(self, request: Request, sample: int) -> int:
        """Return the number of tokens after which the model itself ends an answer."""
        return self._draw("answer", request, sample, 1, 40)

    def fault_length(self, request: Request, sample: int) -> int:
        """Return the number of tokens after which the logits of an answer are not finite."""
        return self._draw("fault", request, sample, 0, 90)

    def reading(self, request: Request, sample: int, elapsed: int) -> np.ndarray:
        """Return the logits that a probe of this trace's kind reads; see `PROBES`."""
        logits = np.zeros(PROBED.num)
        kind = self._probe
        if kind == "any":
            kind = random.Random(f"{self.seed} {request.id} {sample} {elapsed}").choice(PROBES)
        if kind == "truth":
            left = max(1, self.answer_length(request, sample) - elapsed)
            logits[PROBED.bucket_of(left)] = 3.0
        elif kind == "shortest":
            logits[0] = 30.0
        elif kind == "longest":
            logits[-1] = 30.0
        elif kind == "nan":
            logits[:] = np.nan
        elif kind == "misshapen":
            logits = np.zeros(PROBED.num + 1)
        return logits

    def _accepted(self) -> Accepted:
        """Return a function from planned to delivered tokens: sometimes 0, never twice in a row."""
        rng, stalled = random.Random(f"{self.seed} accepted"), set()

        def accepted(request: Request, sample: int, length: int) -> int:
            at = (request.id, sample)
            num = rng.choice([0, 1, 1, 2, 3, 100]) if at not in stalled else rng.randint(1, 3)
            stalled.discard(at)
            if num == 0:
                stalled.add(at)
            return num

        return accepted

    def _draw(self, what: str, request: Request, sample: int, low: int, high: int) -> int:
        return random.Random(f"{self.seed} {what} {request.id} {sample}").randint(low, high)

    def engine(
        self,
        policy: Policy,
        config: EngineConfig | None = None,
        clock: VirtualClock | None = None,
        disk: DiskTier | None = None,
        is_alone: bool = False,
    ) -> Engine:
        """Return a new engine on a simulated executor; both have the given or a new clock."""
        clock = clock or VirtualClock()
        executor = self._executor(config or self.config, clock, is_alone=is_alone)
        return Engine(executor, policy, clock, disk=disk, grammars=self._grammars)

    def _executor(
        self, config: EngineConfig, clock: VirtualClock, *, is_alone: bool = False
    ) -> SimulatedExecutor:
        return SimulatedExecutor(
            config,
            clock,
            answer_length=self.answer_length,
            fault_length=self.fault_length if self._with_faults else None,
            accepted=self._accepted() if self._falls_short and not is_alone else None,
            refinement=None if self._probe is None else REFINEMENT,
            reading=None if self._probe is None else self.reading,
        )

    def run(
        self,
        policy: Policy,
        *,
        cancel_rate: float = 0.0,  # cancellations a step
        resize_rate: float = 0.0,  # resizes of the pool a step
        recompute_rate: float = 0.0,  # replacements of the cache by one of another size, a step
        update_rate: float = 0.0,
        disk: DiskTier | None = None,
    ) -> dict[tuple[str, int], Outcome]:
        """Serve the requests under a policy, and return how each sample of each of them ended.

        Arrivals, cancellations and resizes come at random. The pool never becomes larger than it
        was at the start.

        Args:
          update_rate: versions of the weights a step; half of them keep the KV of running requests.
            The rate is higher while sequences await pages from the host.

        Returns:
          By request id and sample.

        Raises:
          AssertionError: an invariant of docs/architecture.md does not hold, or nothing advances.
        """
        self.pool_sizes, self.num_moved = {self.config.num_pages}, 0
        rng = random.Random(f"{self.seed} run")
        clock = VirtualClock()
        executor = self._executor(self.config, clock)
        engine = Engine(executor, policy, clock, disk=disk, grammars=self._grammars)
        arriving, sequences = list(self.requests), []
        self.asked, self.num_gaps, self.num_awaited, self.num_reopened = [], 0, 0, 0
        answered: set[int] = set()
        max_idle = MAX_IDLE_STEPS * (2 * policy.num_device_groups - 1)
        idle = num_waits = 0
        while arriving or engine.has_work:
            if arriving and rng.random() < 0.4:
                self.asked.append(arriving.pop(0))
                sequences += engine.add(self.asked[-1])
            if self._with_conversations:
                arriving += self._next_turns(sequences, answered)
            if sequences and rng.random() < cancel_rate:
                engine.scheduler.end(rng.choice(sequences), "cancelled")
            if resize_rate and rng.random() < resize_rate:
                self._resize(engine, rng)
            if recompute_rate and rng.random() < recompute_rate:
                self._recompute(engine, executor, rng)
            awaits = any(s.kv.awaits is not None for s in engine.scheduler.running)
            if update_rate and rng.random() < (0.5 if awaits else update_rate):
                self._update(engine, rng)
            before = _advancement(sequences, engine)
            closed = [s for s in sequences if s.phase is Phase.CLOSING]
            engine.step()
            engine.scheduler.check_integrity()
            self.num_reopened += sum(s.phase is Phase.WAITING for s in closed)
            self.num_gaps += sum(len(sequence.kv.ahead) for sequence in engine.scheduler.running)
            if engine.awaits_disk and disk is not None:
                idle = -1
                if engine.idle_until_s is not None:
                    disk.flush()  # which takes no time on the virtual clock
            elif engine.has_work and engine.idle_until_s is not None:
                clock.advance_to(engine.idle_until_s)
                idle, num_waits = -1, num_waits + 1
            self.num_awaited += sum(s.kv.awaits is not None for s in engine.scheduler.running)
            if _advancement(sequences, engine) != before or not engine.has_work:
                idle = num_waits = 0
            else:
                idle += 1
            self._require(num_waits <= MAX_WAITS, "the policy waits without end")
            self._require(idle <= max_idle, "nothing advances")
        engine.close(is_whole=True)
        self.counters = engine.scheduler.counters()
        self.num_refined = engine.scheduler.lengths.num_refined
        return self._outcomes(engine, sequences)

    def check(self, policy: Policy, **options: Any) -> dict[tuple[str, int], Outcome]:
        """Serve as `run` does, and compare each sample with a run of its request alone."""
        together = self.run(policy, **options)
        for (name, sample), alone in self.expected().items():
            found = together[name, sample]
            self._require(
                found.agrees_with(alone),
                f"sample {sample} of request {name!r} is {found} under {policy.name}, and {alone} "
                "alone",
            )
        return together

    def _resize(self, engine: Engine, rng: random.Random) -> None:
        num_pages = self.config.num_pages
        if rng.random() < 0.9:
            num_pages = rng.randint(rng.choice([2, 2 + num_pages // 2]), num_pages)
        engine.drain()
        before = {s.key: s.kv.table.pages for s in engine.scheduler.running}
        engine.resize(num_pages)
        engine.scheduler.check_integrity()
        for sequence in engine.scheduler.running:
            pages, old = sequence.kv.table.pages, before[sequence.key]
            stayed = [new == page for new, page in zip(pages, old, strict=True)]
            self._require(stayed == [page < num_pages for page in old], "a page moved needlessly")
            self.num_moved += not all(stayed)
        self.pool_sizes.add(num_pages)

    def _recompute(self, engine: Engine, executor: SimulatedExecutor, rng: random.Random) -> None:
        fewest = 1 + replace(self.config, max_context=self.config.max_length).max_pages_per_sequence
        num_pages = rng.randint(fewest, self.config.num_pages)
        engine.drain()
        self._require(engine.drop_kv() >= 0, "fewer than no tokens")
        executor.resize(2, ())  # which drops every page
        executor.resize(num_pages, ())
        engine.pool_exchanged(num_pages)
        self._require(not engine.scheduler.running, "a sequence runs without KV")
        engine.scheduler.check_integrity()
        self.pool_sizes.add(num_pages)

    def _update(self, engine: Engine, rng: random.Random) -> None:
        engine.drain()
        weights = Weights(engine.weights.version + 1)
        name = engine.name_of(weights.version)
        engine.weights_changed(weights, name, keeps_kv=rng.random() < 0.5)
        engine.scheduler.check_integrity()
        found = {tier for request in self.asked for tier in engine.residency(request.prompt)}
        self._require(found <= {"nowhere"}, "pages of former weights are found")

    def _next_turns(self, sequences: list[Sequence], answered: set[int]) -> list[Request]:
        """Return turns that follow answers which have just ended; not every answer has one."""
        turns = []
        for sequence in sequences:
            if sequence.phase is not Phase.FINISHED or sequence.key in answered:
                continue
            answered.add(sequence.key)
            rng = random.Random(f"{self.seed} turn {sequence.request.id} {sequence.sample_index}")
            prompt = sequence.known_tokens + tuple(
                rng.randrange(1, 50) for _ in range(rng.randint(0, 5))
            )
            longest = min(self.config.max_prompt_tokens, 1000)
            is_gone_on_with = rng.random() < 0.6 / sequence.request.params.n
            if is_gone_on_with and len(prompt) <= longest and not sequence.error:
                name = f"{sequence.request.id}.{sequence.sample_index}"
                turns.append(replace(sequence.request, id=name, prompt=prompt))
        return turns

    def expected(
        self, requests: abc.Iterable[Request] | None = None
    ) -> dict[tuple[str, int], Outcome]:
        """Return how every sample ends when its request is served alone.

        Alone it has all the memory that it can use, and one token a step. Outcomes are cached for
        other traces of this seed. `requests` are by default all that arrived in the last run.
        """
        asked = self.asked if requests is None else requests
        return {key: outcome for request in asked for key, outcome in self._alone(request)}

    def _alone(self, request: Request) -> abc.Iterable[tuple[tuple[str, int], Outcome]]:
        key = (self.seed, self._with_faults, self._probe, request.id, request.prompt)
        key = (*key, self._grammars is None, request.params.pools, self.config.pooling)
        key = (*key, self.config.layer_windows, self.config.max_length)
        if key not in _alone:
            _alone[key] = self._serve_alone(request)
        return _alone[key].items()

    def _serve_alone(self, request: Request) -> dict[tuple[str, int], Outcome]:
        config = EngineConfig(
            page_size=self.config.page_size,
            num_pages=1 + 3 * self.config.max_pages_per_sequence,
            max_slots=3,
            max_context=self.config.max_length,
            max_step_tokens=1000,
            max_decode_iterations=1,
            layer_windows=self.config.layer_windows,
            pooling=self.config.pooling,
        )
        config = replace(config, num_pages=1 + 3 * config.max_pages_per_sequence)
        engine = self.engine(PRESETS["orca"], config, is_alone=True)
        sequences = engine.add(request)
        while engine.has_work:
            engine.step()
        return self._outcomes(engine, sequences)

    def _outcomes(
        self, engine: Engine, sequences: list[Sequence]
    ) -> dict[tuple[str, int], Outcome]:
        usage = engine.scheduler.page_usage()
        self._require(usage.num_owned == usage.num_reserved == 0, "pages leaked")
        engine.scheduler.check_integrity()
        self._require(all(s.phase is Phase.FINISHED for s in sequences), "a sequence never ended")
        num_preemptions = sum(s.num_preemptions for s in sequences)
        counted = engine.scheduler.counters()["num_preemptions"]
        self._require(counted == num_preemptions, "preemptions are miscounted")
        return {
            (s.request.id, s.sample_index): Outcome(
                tuple(s.output),
                str(s.finish_reason),
                s.num_preemptions,
                None if s.pooled is None or s.pooled.mean is None else s.pooled.mean.item(),
            )
            for s in sequences
        }

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise AssertionError(f"seed {self.seed}: {otherwise}")


def _advancement(sequences: list[Sequence], engine: Engine) -> tuple[object, ...]:
    num_pages_in = engine.scheduler.counters()["num_pages_in"]
    return (num_pages_in, *((s.kv.num_computed, len(s.output), s.phase) for s in sequences))
