"""Measurement of step times by running an executor on plans of every compiled shape.

Steps run with two in flight, as the engine submits them, and the measured time is from one step's
end to the next one's. So the table holds the times of served steps, including the load of the host,
and is not fitted to a workload.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
from tqdm import tqdm

from jaxserve.core.clock import Clock, VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.executor import Executor, StepHandle
from jaxserve.execution.pages import PAGES_A_CALL
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.memory.snapshots import HostStateCopy
from jaxserve.planning.step_times import Curve, GroupTimes, Origin, StepTimes
from jaxserve.scheduling.plan import LINK, Admission, Handover, Row, StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.steps.slots import ADMISSIONS_A_CALL

# Timed steps of a shape per round; one untimed step before them fills the pipeline.
TIMED_STEPS = 3
SHORT_TOKENS = 16
# Tokens of each answer whose planning is timed.
_SHORT_ANSWER = 64
# Name -> size -> (positions attended to, seconds).
Measured = defaultdict[str, defaultdict[int, list[tuple[float, float]]]]


@final
@dataclass(frozen=True)
class Shape:
    """A shape of a compiled size, attending to `positions` an iteration; `time` measures it."""

    name: str
    size: int
    positions: float
    time: Callable[[], float]


@final
class StepBench:
    def __init__(self, executor: Executor, clock: Clock, group: int):
        self.config = executor.config
        self._executor = executor
        self._group = group
        self._clock = clock
        self._live: set[int] = set()
        self._submits_s: list[float] = []
        # Long enough to hide the costs outside the iterations, short enough for slow devices.
        self._num_iterations = max(1, self.config.max_decode_iterations // 2)
        # A decoder's first position: after an encoder's prompt of one page, if there is one.
        self._first = self.config.page_size if self.config.has_encoder else 0

    def shapes(self) -> list[Shape]:
        config = self.config
        shapes = [Shape("loop", size, 0, partial(self._loop, size)) for size in config.slot_buckets]
        for size in config.slot_buckets:
            shapes += self._decode_shapes(size)
        for size in config.token_buckets:
            shapes += self._body_shapes(size)
            shapes += self._encode_shapes(size) if config.has_encoder else []
        for size in config.head_buckets:
            shapes += [
                Shape("sampling", size, 0, partial(self._rows_of_one, size, True)),
                Shape("not sampling", size, 0, partial(self._rows_of_one, size, False)),
            ]
        return [*shapes, *(Shape(name, 0, 0, edit) for name, edit in self._edits().items())]

    def table(self, origin: Origin, measured: Measured) -> StepTimes:
        def only(name: str, size: int = 0) -> float:
            return measured[name][size][0][1]

        loop_s = {size: only("loop", size) for size in self.config.slot_buckets}
        decode_s = {
            size: _curve((x, (s - loop_s[size]) / self._num_iterations) for x, s in points)
            for size, points in measured["decode"].items()
        }
        without_edit_s = loop_s[self.config.slot_buckets[0]]
        return StepTimes(
            origin=origin,
            decode_s=decode_s,
            loop_s=loop_s,
            prefill_s={size: _curve(points) for size, points in measured["body"].items()},
            encode_s={size: _curve(points) for size, points in measured["encode"].items()},
            head_s={
                size: max(0.0, only("sampling", size) - only("not sampling", size))
                for size in self.config.head_buckets
            },
            edit_s=max(0.0, only("edit") - without_edit_s),
            move_s=max(0.0, only("move") - without_edit_s),
            admit_s=max(0.0, only("admit and edit") - only("edit")),
            page_out_s=max(0.0, only("swap out") - without_edit_s) / PAGES_A_CALL,
            page_in_s=max(0.0, only("swap in") - without_edit_s) / PAGES_A_CALL,
            plan_s=_planning_s(self.config, self._clock),
            submit_s=statistics.median(self._submits_s),
            state_out_s=max(0.0, only("state out") - without_edit_s),
            state_in_s=max(0.0, only("state in") - without_edit_s),
        )

    # ---- shapes ----

    def _loop(self, size: int, edits: Sequence[dict[str, Any]] = ({},)) -> float:
        """Time a decode loop without iterations."""
        num_steps = TIMED_STEPS + 1
        steps = [edits[i % len(edits)] for i in range(num_steps)]
        return self._time([_plan(num_iterations=0, window_size=size, **step) for step in steps])

    def _decode_shapes(self, size: int) -> list[Shape]:
        """Return decode shapes with short, medium and maximum contexts, equal for all rows."""
        grown = self._num_iterations * (TIMED_STEPS + 1)
        longest = max(1, self.config.max_context - grown - 1)
        shortest = min(self._first + SHORT_TOKENS, longest)
        contexts = sorted({shortest, max(shortest, -(-longest // 4)), longest})
        # The mean growth of the contexts in the timed iterations and the steps before them.
        mean = (self._num_iterations * (TIMED_STEPS + 2) - 1) / 2
        return [
            Shape("decode", size, size * (c + mean), partial(self._decode, size, c, c + grown))
            for c in contexts
        ]

    def _decode(self, size: int, context: int, room: int) -> float:
        # Most positions of an encoder-decoder model are in the prompt.
        most = min(context - 1, self.config.max_prompt_tokens) // self.config.page_size
        encoded = max(self._first, most * self._first)
        self.reset([context] * size, room, encoded=[encoded] * size)
        rows = tuple(Row(slot, slot, 0, 1, self._num_iterations) for slot in range(size))
        step = _plan(rows=rows, num_iterations=self._num_iterations, window_size=size)
        return self._time([step] * (TIMED_STEPS + 1))

    def _body_shapes(self, size: int) -> list[Shape]:
        """Return shapes with many short prompts, few long prompts, and ends of the longest."""
        first = self._first
        most = self.config.max_context - 1 - first
        longest = max(1, (self.config.max_context - first) // 2)
        # Slots of short contexts may hold fewer tokens than the largest size.
        num_tokens = min(size, self.config.max_slots * most)
        few = min(self.config.max_slots, -(-size // longest))
        many = min(self.config.max_slots, max(few, size // SHORT_TOKENS))
        shapes: dict[int, Shape] = {}
        for num_rows, at in ((many, 0), (few, 0), (few, most - longest)):
            lengths = [len(part) for part in np.array_split(np.arange(num_tokens), num_rows)]
            start = first + min(at, most - lengths[0])
            positions = sum(n * start + n * (n + 1) // 2 for n in lengths if n > 1)
            shape = Shape("body", size, positions, partial(self._body, lengths, start))
            shapes.setdefault(positions, shape)
        return list(shapes.values())

    def _encode_shapes(self, size: int) -> list[Shape]:
        """Return shapes with many short prompts of an encoder, and with few long ones."""
        longest = self.config.max_prompt_tokens
        num_tokens = min(size, self.config.max_slots * longest)
        few = -(-num_tokens // longest)
        many = min(self.config.max_slots, max(few, size // SHORT_TOKENS))
        shapes: dict[int, Shape] = {}
        for num_rows in (many, few):
            lengths = [len(part) for part in np.array_split(np.arange(num_tokens), num_rows)]
            positions = sum(n * n for n in lengths)
            shape = Shape("encode", size, positions, partial(self._encode, lengths))
            shapes.setdefault(positions, shape)
        return list(shapes.values())

    def _encode(self, lengths: Sequence[int]) -> float:
        contexts = [min(n + self._first, self.config.max_context) for n in lengths]
        self.reset(contexts, encoded=lengths)
        rows = tuple(Row(i, i, 0, n, 0, encodes=True) for i, n in enumerate(lengths))
        return self._time([_plan(rows=rows)] * (TIMED_STEPS + 1))

    def _body(self, lengths: Sequence[int], start: int) -> float:
        self.reset([start + n + 1 for n in lengths])
        rows = tuple(Row(i, i, start, n, 0) for i, n in enumerate(lengths))
        return self._time([_plan(rows=rows)] * (TIMED_STEPS + 1))

    def _rows_of_one(self, size: int, samples: bool) -> float:
        """Time mixed steps of `size` decode rows, with or without sampling."""
        # Rows that sample lengthen their slots. A device computes other rows only within the length
        # of their slots, so those slots have it from the start.
        short = self._first + SHORT_TOKENS
        longest = short + TIMED_STEPS + 1
        self.reset([short if samples else longest] * size, longest)
        first = short - 1
        return self._time(
            [
                _plan(rows=tuple(Row(i, i, first + step, 1, int(samples)) for i in range(size)))
                for step in range(TIMED_STEPS + 1)
            ]
        )

    @property
    def prompt_handover(self) -> StepPlan:
        """The handover of the pages of a step of `prompt_steps`, to the second group."""
        config = self.config
        num = config.max_slots * -(-self._short_prompt // config.page_size)
        pages = tuple(range(1, 1 + min(num, config.num_pages - 1)))
        return _plan(num_iterations=0, handovers=(Handover(0, 0, 1, pages),), group=LINK)

    def prompt_steps(self) -> Iterator[StepPlan]:
        """Yield endless steps that compute short prompts in all slots."""
        config, num = self.config, self._short_prompt
        encodes = config.has_encoder
        context = min(num + (self._first or 1), config.max_context)
        self.reset([context] * config.max_slots, encoded=[num if encodes else 0] * config.max_slots)
        rows = tuple(Row(i, i, 0, num, 0, encodes=encodes) for i in range(config.max_slots))
        while True:
            yield _plan(rows=rows, group=self._group)

    @property
    def _short_prompt(self) -> int:
        config = self.config
        num = min(SHORT_TOKENS, config.max_step_tokens // config.max_slots)
        return min(max(1, num), config.max_prompt_tokens)

    def decode_loops(self, num_iterations: int) -> Iterator[StepPlan]:
        """Yield endless decode loops of all slots, as long as allowed; full contexts restart."""
        config, context = self.config, self._first + 1
        room = config.max_context - context - 1
        num_iterations = max(1, min(num_iterations, config.max_decode_iterations, room))
        loop = _plan(
            rows=tuple(Row(i, i, 0, 1, num_iterations) for i in range(config.max_slots)),
            num_iterations=num_iterations,
            window_size=config.slot_buckets[-1],
            group=self._group,
        )
        while True:
            anew = self._contents([context] * config.max_slots, config.max_context)
            self._live = set(range(config.max_slots))
            yield replace(loop, **anew)
            for _ in range(room // num_iterations - 1):
                yield loop

    def _edits(self) -> dict[str, Callable[[], float]]:
        smallest, last = self.config.slot_buckets[0], self.config.max_slots - 1
        admissions = tuple(
            _admission(self.config, slot, self._first + 1, self._first)
            for slot in range(last + 1)[:ADMISSIONS_A_CALL]
        )
        released = {"releases": tuple(new.slot for new in admissions)}
        moves = [{"moves": ((last, 0),)}, {"moves": ((0, last),)}] if last else [{}]

        def after_reset(edits: Sequence[dict[str, Any]]) -> float:
            self.reset([self._first + 1] * self.config.max_slots)
            self.reset()
            return self._loop(smallest, edits)

        out, back = ((NULL_PAGE, 0),) * PAGES_A_CALL, ((0, NULL_PAGE),) * PAGES_A_CALL
        swaps = [{"swaps_out": out}, {"swaps_in": back}] if self.config.num_host_pages else [{}, {}]
        states: list[dict[str, Any]] = [{}, {}]
        if self.config.num_host_snapshots:
            states = [{"saves": (HostStateCopy(0, 0, goes_out),)} for goes_out in (True, False)]
        return {
            # In this order, because a page must be swapped out before it is swapped in.
            "swap out": partial(self._loop, smallest, swaps[:1]),
            "swap in": partial(self._loop, smallest, swaps[1:]),
            "state out": partial(self._loop, smallest, states[:1]),
            "state in": partial(self._loop, smallest, states[1:]),
            "edit": partial(after_reset, [released]),
            "move": partial(after_reset, moves),
            "admit and edit": partial(after_reset, [{"admissions": admissions, **released}]),
        }

    # ---- runs on the executor ----

    def reset(
        self, contexts: Sequence[int] = (), room: int = 0, *, encoded: Sequence[int] | None = None
    ) -> None:
        """Put sequences of `contexts` tokens into slots 0, 1, ...; other slots are inert.

        If the pool is too small, sequences share pages, which changes no time. Pages hold `room`
        tokens if that is more. `encoded` are the prompt tokens that an encoder reads, by default a
        page.
        """
        contents = self._contents(contexts, room, encoded=encoded)
        smallest = self.config.slot_buckets[0]
        self._submit(_plan(**contents, num_iterations=0, window_size=smallest)).collect()
        self._live = set(range(len(contexts)))

    def _contents(
        self, contexts: Sequence[int], room: int = 0, *, encoded: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return the edits of slots of a plan for `reset`."""
        config = self.config
        encoded = [self._first] * len(contexts) if encoded is None else encoded
        num_pages = -(-max(room, *contexts, 1) // config.page_size) * config.page_layout.num_tables
        pages = 1 + np.arange(len(contexts) * num_pages) % (config.num_pages - 1)
        return {
            "releases": tuple(self._live),
            "admissions": tuple(
                _admission(config, slot, *sizes)
                for slot, sizes in enumerate(zip(contexts, encoded, strict=True))
            ),
            "page_updates": tuple(
                (i // num_pages, i % num_pages, page) for i, page in enumerate(pages.tolist())
            ),
        }

    def _submit(self, plan: StepPlan) -> StepHandle:
        return self._executor.submit(replace(plan, group=self._group))

    def _time(self, plans: Sequence[StepPlan]) -> float:
        """Return the median seconds from one step's end to the next one's, with two in flight."""
        ends, newest = [], None
        for plan in plans:
            begin_s = self._clock.now()
            oldest, newest = newest, self._submit(plan)
            self._submits_s.append(self._clock.now() - begin_s)
            self._live.update(new.slot for new in plan.admissions)
            if oldest is not None:
                oldest.collect()
                ends.append(self._clock.now())
        assert newest is not None
        newest.collect()
        ends.append(self._clock.now())
        return statistics.median(np.diff(ends).tolist())


def _plan(**fields: Any) -> StepPlan:
    nothing: dict[str, Any] = {
        "index": 0,
        "swaps_out": (),
        "swaps_in": (),
        "releases": (),
        "moves": (),
        "admissions": (),
        "page_updates": (),
        "rows": (),
        "num_iterations": 1,
        "window_start": 0,
        "window_size": 0,
    }
    return StepPlan(**{**nothing, **fields})


def _admission(config: EngineConfig, slot: int, num_tokens: int, encoded: int) -> Admission:
    tokens = np.arange(num_tokens, dtype=np.int32) % SHORT_TOKENS
    num_padding = -encoded % config.page_size
    request = Request(
        id=f"profile-{slot}",
        prompt=tuple(tokens.tolist()),
        params=SamplingParams(),
        arrival_s=0.0,
        num_encoded=encoded + num_padding,
        num_padding=num_padding,
    )
    return Admission(slot, request, 0, tokens, config.max_context)


def _curve(points: Iterator[tuple[float, float]] | Sequence[tuple[float, float]]) -> Curve:
    # The difference of two timings may be negative on a busy machine.
    return Curve(tuple(sorted((x, max(1e-9, s)) for x, s in points)))


def _planning_s(config: EngineConfig, clock: Clock) -> float:
    """Return the host's seconds per step for the scheduler and the engine with full slots."""
    times, begin_s = [], clock.now()
    for _ in _planned(config, _SHORT_ANSWER):
        end_s = clock.now()
        times.append(end_s - begin_s)
        begin_s = end_s
    return statistics.median(times[1:] or times)  # the first one includes making the engine


def planning(config: EngineConfig) -> Iterator[None]:
    """Do the host's work for a step with full slots at each `next`, endlessly."""
    while True:
        yield from _planned(config, config.max_prompt_tokens)


def _planned(config: EngineConfig, num_tokens: int) -> Iterator[None]:
    """Plan the steps of one answer per slot, one step at each `next`."""
    virtual = VirtualClock()
    engine = Engine(
        SimulatedExecutor(config, virtual, reads_context=False), PRESETS["auto"], virtual
    )
    params = SamplingParams(max_tokens=min(num_tokens, config.max_prompt_tokens))
    for i in range(config.max_slots):
        engine.add(Request(id=str(i), prompt=(1,), params=params, arrival_s=0.0))
    while engine.has_work:
        engine.step()
        yield


# Least time for which a round times a shape repeatedly, to average short fluctuations of the
# machine's speed.
_SHAPE_S = 0.5
_MAX_REPEATS = 8
# Rounds in which steps of two groups run alone and concurrently.
_BESIDE_ROUNDS = 3


def measure(
    executor: Executor,
    origin: Origin,
    clock: Clock,
    *,
    group: int = 0,
    rounds: int = 2,
    progress: bool = True,
) -> StepTimes:
    """Time every shape in several rounds, and return the median of the rounds for each entry.

    Rounds spread each shape over the whole measurement, so that a slow drift of the machine's speed
    affects all entries alike. The executor must be idle; its slots are inert afterwards.

    Args:
      origin: origin of the returned table.
      clock: the executor's clock if it is simulated, otherwise a `WallClock`.
      group: the device group to time.

    Raises:
      InvalidConfigError: `rounds` is not a whole number of at least 1.
    """
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise InvalidConfigError(
            f"rounds={rounds!r} is not allowed; pass a whole number of at least 1"
        )
    bench = StepBench(executor, clock, group)
    shapes = bench.shapes()
    tables: list[StepTimes] = []
    with tqdm(
        total=rounds * len(shapes), desc="timing steps", leave=False, delay=2, disable=not progress
    ) as bar:
        for _ in range(rounds):
            measured: Measured = defaultdict(lambda: defaultdict(list))
            for shape in shapes:
                bar.set_postfix_str(f"{shape.name} {shape.size}", refresh=False)
                measured[shape.name][shape.size].append((shape.positions, _repeated(shape, clock)))
                bar.update()
            tables.append(bench.table(origin, measured))
    bench.reset()
    return StepTimes.median(tables)


def measure_beside(executor: Executor, clock: Clock) -> tuple[float, ...]:
    """Return how many times as long a step of each device group takes while the other one runs.

    The first group computes prompts, and the second one decode loops of all slots with the number
    of iterations that takes about as long: where groups take turns on something that they share, a
    step waits for one of the other, so the result depends on that one's length. Each group runs
    alone and with the other in turn, for several rounds, whose median counts. In concurrent runs
    the pages of prompts are handed over as soon as they are computed, and the host plans each step
    as in serving, because both may slow the groups. The result is 1 if they share nothing and steps
    take longer than their planning.
    """
    prompts, decodes = (StepBench(executor, clock, group) for group in (0, 1))
    handover, plans = prompts.prompt_handover, planning(executor.config)

    def step_s(*lanes: Iterator[StepPlan]) -> list[float]:
        return _step_s(executor, clock, lanes)

    prompt_s = step_s(prompts.prompt_steps())[0]
    iteration_s = step_s(decodes.decode_loops(1))[0]
    num_iterations = round(prompt_s / max(iteration_s, 1e-9))
    rounds = []
    for _ in range(_BESIDE_ROUNDS):
        alone = [
            step_s(prompts.prompt_steps())[0],
            step_s(decodes.decode_loops(num_iterations))[0],
        ]
        lanes = prompts.prompt_steps(), decodes.decode_loops(num_iterations)
        beside = _step_s(executor, clock, lanes, handover, plans)
        rounds.append(np.divide(beside, alone))
    for bench in (prompts, decodes):
        bench.reset()
    return tuple(np.maximum(1.0, np.median(rounds, axis=0)).tolist())


def _step_s(
    executor: Executor,
    clock: Clock,
    plans: Sequence[Iterator[StepPlan]],
    handover: StepPlan | None = None,
    planned: Iterator[None] | None = None,
) -> list[float]:
    """Return the mean seconds from one step's end to the next one's, of concurrent lanes of steps.

    Each lane has two steps in flight. `handover` follows each step of the first lane, unless the
    previous one is still running. `planned` does the host's work for a step.
    """
    copying: StepHandle | None = None
    lanes = [deque(executor.submit(next(lane)) for _ in range(2)) for lane in plans]
    ends: list[list[float]] = [[] for _ in plans]
    end_s = clock.now() + _SHAPE_S
    while clock.now() < end_s or min(map(len, ends)) < 2 + TIMED_STEPS:
        ready = [i for i, lane in enumerate(lanes) if lane[0].is_ready()]
        for i in ready:
            lanes[i].popleft().collect()
            ends[i].append(clock.now())
            if planned is not None:
                next(planned)
            if copying is not None and copying.is_ready():
                copying.collect()
                copying = None
            if i == 0 and handover is not None and copying is None:
                copying = executor.submit(handover)
            lanes[i].append(executor.submit(next(plans[i])))
        if not ready:
            clock.wait()
    for lane in lanes:
        for handle in lane:
            handle.collect()
    if copying is not None:
        copying.collect()
    # Steps that were in flight before all lanes ran do not count.
    return [(each[-1] - each[1]) / (len(each) - 2) for each in ends]


def _repeated(shape: Shape, clock: Clock) -> float:
    begin_s = clock.now()
    times = [shape.time()]
    while clock.now() - begin_s < _SHAPE_S and len(times) < _MAX_REPEATS:
        times.append(shape.time())
    return statistics.median(times)


# Pages of the larger timed handover; the smaller one has the pages of one call.
_MANY_PAGES = 4 * PAGES_A_CALL
_TIMINGS = 5


def measure_groups(
    executor: Executor,
    origins: Sequence[Origin],
    clock: Clock,
    *,
    rounds: int = 2,
    progress: bool = True,
) -> GroupTimes:
    """Time the steps of each device group, alone and while the other computes, and the handovers.

    The executor must be idle. Afterwards its slots are inert and its pages are overwritten.

    Args:
      clock, rounds: see `measure`.
    """
    groups = tuple(
        measure(executor, origin, clock, group=group, rounds=rounds, progress=progress)
        for group, origin in enumerate(origins)
    )
    few = min(PAGES_A_CALL, executor.config.num_pages - 1)
    many = min(_MANY_PAGES, executor.config.num_pages - 1)
    few_s, many_s = (_handover_s(executor, clock, num_pages) for num_pages in (few, many))
    page_s = max(0.0, many_s - few_s) / (many - few) if many > few else few_s / few
    return GroupTimes(
        groups=groups,
        handover_s=max(0.0, few_s - few * page_s),
        page_s=page_s,
        beside=measure_beside(executor, clock),
    )


def _handover_s(executor: Executor, clock: Clock, num_pages: int) -> float:
    handover = Handover(0, 0, 1, tuple(range(1, 1 + num_pages)))
    plan = StepPlan(index=0, num_iterations=0, handovers=(handover,), group=LINK)
    seconds = []
    for _ in range(_TIMINGS + 1):
        begin_s = clock.now()
        executor.submit(plan).collect()
        seconds.append(clock.now() - begin_s)
    return statistics.median(seconds[1:])
