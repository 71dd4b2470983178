"""Turns sequences into step plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from jaxserve.core.clock import Clock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    HandoverError,
    InvalidConfigError,
    JaxserveError,
    NumericalError,
    PromptTooLongError,
)
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import FinishReason, Request, TokenLogprob
from jaxserve.memory.page_pool import Moves
from jaxserve.predictor import Refinement
from jaxserve.scheduling.kv.manager import KVManager, PageUsage
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.order import OrderKeys
from jaxserve.scheduling.plan import Handover, PromptLogprobs, Row, StepPlan, StepResult
from jaxserve.scheduling.policy import IterationShape, Policy
from jaxserve.scheduling.queues import Queues
from jaxserve.scheduling.sequence import Phase, PooledPrompt, Sequence
from jaxserve.scheduling.slack import Pace
from jaxserve.scheduling.speculation import Speculation
from jaxserve.scheduling.step import Step

# Handovers in a row of a sequence whose pages may be lost before its request fails.
MAX_LOST_HANDOVERS = 3


def max_length(request: Request, config: EngineConfig) -> int:
    """Return the tokens of prompt and output at which an answer is cut."""
    if request.params.pools:
        return min(config.max_length, len(request.prompt))
    if request.params.max_tokens is None:
        return config.max_length
    return min(config.max_length, len(request.prompt) + request.params.max_tokens)


def end_of(sequence: Sequence, *, has_new: bool) -> FinishReason | None:
    """Return why a sequence ends with its newest token (new if `has_new`); None if it continues."""
    request = sequence.request
    if sequence.pooled is not None:
        return "stop" if sequence.pooled.is_whole else None
    if has_new and sequence.output[-1] in request.stop_token_ids:
        return "stop"
    end = request.end_length(sequence.max_length, sequence.sample_index)
    return "length" if sequence.num_known >= end else None


def too_long(sequence: Sequence, config: EngineConfig) -> PromptTooLongError:
    return PromptTooLongError(
        f"request {sequence.request.id}: {sequence.prompt_length} prompt tokens and "
        f"{len(sequence.output)} of the answer leave no room for another in the page pool, which "
        f"was resized and holds {config.max_length} tokens of one request; give it more memory "
        "(Runtime.resize_kv) and submit it again"
    )


def not_finite(sequence: Sequence) -> NumericalError:
    said = f"request {sequence.request.id}: the model's logits were NaN or infinite, or "
    after = f" left no token to choose, after {len(sequence.output)} output tokens. Check "
    others = "the weights, or load the model with dtype='float32'"
    if sequence.request.awaits_tokens:
        return NumericalError(
            f"{said}grammar, bias and penalties{after}that logit_bias allows a token that the "
            f"grammar does, and {others}"
        )
    return NumericalError(f"{said}bias and penalties{after}{others}")


def not_handed_over(sequence: Sequence) -> HandoverError:
    return HandoverError(
        f"request {sequence.request.id}: its KV did not arrive at the devices that compute answers "
        f"in {MAX_LOST_HANDOVERS} attempts. Check the links between the device groups, and create "
        "a new runtime, on one group if they stay broken"
    )


def check_groups(iteration: IterationShape[Any], policy: Policy) -> None:
    """Raise InvalidConfigError if an iteration shape plans for another number of device groups."""
    if iteration.num_device_groups != policy.num_device_groups:
        raise InvalidConfigError(
            f"{iteration} plans for {iteration.num_device_groups} device groups, and policy "
            f"{policy.name!r} has {policy.num_device_groups}; adopt a shape for as many groups, or "
            "create an engine with another policy"
        )


def check_has_groups(policy: Policy, num_device_groups: int) -> None:
    """Raise InvalidConfigError if an executor has fewer device groups than a policy plans for."""
    if policy.num_device_groups > num_device_groups:
        raise InvalidConfigError(
            f"policy {policy.name!r} plans for {policy.num_device_groups} device groups, and this "
            f"executor has {num_device_groups}; pass an executor with as many, as a runtime on "
            'sharding.DeviceGroups has it, or a policy for one group, such as "exegpt_rra"'
        )


# Number of waiting sequences, from the first, whose pages are prefetched.
_MAX_AWAITED = 4


@final
@dataclass(frozen=True)
class Progress:
    """News of one sequence from one step: `num_new` tokens, and perhaps its end."""

    sequence: Sequence
    num_new: int


def take_results(sequence: Sequence, row: Row, index: int, result: StepResult) -> int:
    """Append what row `index` delivered to its sequence, and return the number of tokens."""
    if result.prompt_logprobs is not None and index in result.prompt_logprobs:
        _append_prompt_logprobs(sequence, row.start, result.prompt_logprobs[index])
    if sequence.pooled is not None and result.pooled is not None and index in result.pooled:
        sequence.pooled.add(row.num_pooled, result.pooled[index])
    count = int(result.num_tokens[index])
    if count:
        tokens = result.tokens[index, :count].tolist()
        wanted = sequence.request.params.logprobs
        scores = () if wanted is None else _scores(tokens, result, index, wanted)
        sequence.append(tokens, scores)
    return count


def _scores(tokens: Seq[int], result: StepResult, row: int, wanted: int) -> Iterator[TokenLogprob]:
    assert result.logprobs is not None and result.processed_logprobs is not None
    for i, token_id in enumerate(tokens):
        top: tuple[tuple[int, float], ...] = ()
        if wanted:
            assert result.top_ids is not None and result.top_logprobs is not None
            top = _pairs(result.top_ids[row, i, :wanted], result.top_logprobs[row, i, :wanted])
        yield TokenLogprob(
            token_id=token_id,
            logprob=float(result.logprobs[row, i]),
            processed_logprob=float(result.processed_logprobs[row, i]),
            top=top,
        )


def _append_prompt_logprobs(sequence: Sequence, start: int, part: PromptLogprobs) -> None:
    """Store the log-probabilities of the prompt tokens after those of a prefill row.

    A prompt that is recomputed keeps the first ones, of the weights that the answer began with.
    """
    wanted = sequence.request.params.prompt_logprobs or 0
    prompt = sequence.request.prompt
    for i in range(len(part.logprobs)):
        position = start + i + 1
        is_kept = bool(sequence.output) and position in sequence.scores.prompt
        if position < len(prompt) and not is_kept:
            top = _pairs(part.top_ids[i, :wanted], part.top_logprobs[i, :wanted])
            sequence.scores.prompt[position] = TokenLogprob(
                token_id=prompt[position],
                logprob=float(part.logprobs[i]),
                processed_logprob=float(part.processed_logprobs[i]),
                top=top,
            )


def _pairs(ids: np.ndarray, logprobs: np.ndarray) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


@final
class Scheduler:
    """Owns every sequence from submission to its end, and the slots that sequences hold.

    `plan` decides the next step from lengths alone and advances the sequences as if it had already
    run, and had delivered as many tokens as it may; `apply` appends what a step delivered, and
    takes back what it did not. Plans of a device group are applied in the order in which they were
    made; any number of them may be in flight.

    Args:
      policy: every decision; its state belongs to this scheduler.
      refinement: how readings of a probe change estimates; None without a probe.
      pace: returns how long steps took recently; None before any step was timed.

    Attributes:
      wake_s: until when the policy or the disk lets the device idle; None if neither does.
    """

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        kv: KVManager,
        refinement: Refinement | None,
        pace: Callable[[], Pace | None],
    ):
        self.policy, self._clock, self._kv = policy, clock, kv
        self.lengths = LengthTracker(refinement)
        self.speculation = Speculation(kv.config.num_proposed, kv.config.speculating_buckets)
        self.wake_s: float | None = None
        self._queues = Queues(policy, kv, self.lengths, clock.now, pace)
        self._policy_state = policy.new_state()
        self._sequences: dict[int, Sequence] = {}
        self._keys, self._plan_indices = itertools.count(), itertools.count()
        self._num_taken_back = self._num_handovers_lost = 0

    # ---- what there is ----

    @property
    def config(self) -> EngineConfig:
        return self._kv.config

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def expects_arrivals(self) -> bool:
        """Whether requests arrive while others run."""
        return self._queues.arrivals.are_expected(self._clock.now())

    @property
    def running(self) -> Seq[Sequence]:
        """Sequences with a slot, in the policy's order."""
        return self._queues.running

    @property
    def waiting(self) -> Seq[Sequence]:
        """Sequences without a slot, in the policy's order."""
        return tuple(self._queues.waiting)

    @property
    def order_keys(self) -> OrderKeys:
        return self._queues.keys

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def begun(self) -> Seq[Sequence]:
        """Sequences that were admitted: those that run, and preempted ones that wait again."""
        return *self._queues.running, *self._queues.waiting.begun

    def page_usage(self) -> PageUsage:
        return self._kv.usage()

    def counters(self) -> dict[str, float]:
        return {
            "num_preemptions": self._queues.num_preemptions,
            "num_refined": self.lengths.num_refined,
            "num_taken_back": self._num_taken_back,
            "num_handovers_lost": self._num_handovers_lost,
            **self._kv.counters(),
            **self.speculation.counters(),
        }

    def tokens_to_reserve(self, sequence: Sequence) -> int:
        return self._queues.tokens_to_reserve(sequence)

    # ---- requests ----

    def add(self, request: Request) -> list[Sequence]:
        """Put a request's samples into the waiting pool; they fail if the pool is now too small."""
        self._queues.arrivals.note(self._clock.now(), is_busy=self.has_work)
        limit = max_length(request, self.config)
        samples: list[Sequence] = []
        for index in range(request.params.n):
            sequence = Sequence(
                key=next(self._keys),
                request=request,
                sample_index=index,
                max_length=limit,
                kv=self._kv.new(request),
                primary=samples[0] if samples and not self.config.has_slot_state else None,
                pooled=self._unpooled(request) if request.params.pools else None,
            )
            self._sequences[sequence.key] = sequence
            self.lengths.add(sequence)
            self._queues.wait(sequence)
            samples.append(sequence)
        for sequence in samples:
            self._fail_if_too_long(sequence)
        return samples

    def _unpooled(self, request: Request) -> PooledPrompt:
        num_tokens = len(request.prompt)
        return PooledPrompt(num_tokens, num_tokens if self.config.pooling == "mean" else 1)

    def end(
        self, sequence: Sequence, reason: FinishReason, error: JaxserveError | None = None
    ) -> None:
        """End a sequence now, in any phase; its tokens in flight are ignored."""
        self._end(sequence, reason, error, is_cut=True)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: JaxserveError | None = None,
        *,
        is_cut: bool = False,
    ) -> None:
        """End a sequence, with its newest token unless it `is_cut`: nothing follows it then."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.WAITING:
            self._queues.waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            if not is_cut and error is None:
                self._kv.save_state(sequence, "end", has_ended=True)
            self._queues.leave_slot(sequence)
        sequence.finish(reason, error, self._clock.now())
        self._kv.end(sequence, is_right=error is None, is_cut=is_cut)
        self.lengths.remove(sequence)
        self._queues.keys.drop(sequence)
        if sequence.num_in_flight == 0:
            del self._sequences[sequence.key]

    def stop_at(
        self, sequence: Sequence, num_outputs: int, error: JaxserveError | None = None
    ) -> None:
        """End a sequence after `num_outputs` of its output tokens; it may have ended with them."""
        reason: FinishReason = "stop" if error is None else "error"
        sequence.cut(num_outputs, reason, error)
        self.end(sequence, reason, error)

    def expect(self, sequence: Sequence, prediction: LengthPrediction) -> None:
        """Set a prediction that arrives after its request, unless there is an estimate."""
        if sequence.phase is not Phase.FINISHED and self.lengths.expect(sequence, prediction):
            if sequence.phase is Phase.WAITING:
                self._queues.waiting.replace(sequence)

    def extend(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Append tokens that are certain, to be computed in its next step; they may end it.

        Only for a sequence that awaits its tokens and has none in flight.
        """
        if sequence.phase not in (Phase.RUNNING, Phase.WAITING) or not tokens:
            return
        assert sequence.awaits_tokens and not sequence.awaits_token
        start = sequence.num_known
        for token in tokens:
            sequence.force(token)
            if reason := end_of(sequence, has_new=True):
                return self._end(sequence, reason)
        if sequence.phase is Phase.WAITING:
            self._queues.waiting.replace(sequence)
        else:
            self._queues.extended(sequence, start)

    def release(self, sequence: Sequence) -> None:
        """Choose its further tokens without awaiting them; until its answer restarts.

        Only for a sequence with a token that is not computed, and no other one.
        """
        assert not sequence.awaits_token
        sequence.release()
        self.speculation.forget(sequence.key)

    def restart(self, sequence: Sequence, *, keeps_output: bool) -> None:
        """Recompute a sequence, because its KV is no longer right; nothing may be in flight.

        Unless it `keeps_output`, its answer restarts, too.
        """
        if sequence.phase is Phase.FINISHED:
            return
        self._kv.restart(sequence, keeps_output=keeps_output)
        if sequence.pooled is not None:
            sequence.pooled.drop()
        if not keeps_output:
            sequence.drop_output()
            self.lengths.restart(sequence)
        if sequence.phase is Phase.RUNNING:
            self._queues.leave_slot(sequence)
            self._queues.wait(sequence)
        else:
            self._queues.waiting.replace(sequence)

    # ---- one step ----

    def plan(self, open_groups: Collection[int]) -> StepPlan | None:
        """Return the next step, or None when nothing can advance before results are applied.

        Also None while sequences wait for the disk: until `wake_s`, or the next arrival.
        `open_groups` may be given a step, with `plan.LINK` for the link.
        """
        self._kv.retrieval.take_in()
        self._kv.leave_windows(self._queues.running)
        step = self._selected(open_groups)
        if step.is_futile:  # but now there is room for other sequences, or for more of the same
            step = self._selected(open_groups)
        if not (step.has_work or self._queues.running):
            if self._kv.retrieval.stop_waiting_for_host():
                step = self._selected(open_groups)
        self.wake_s = step.wake_s
        if not step.has_work:
            self.wake_s = self._kv.retrieval.gives_up_s if self.wake_s is None else self.wake_s
            return None
        self._kv.prefetch(itertools.islice(self._queues.waiting.ready(), _MAX_AWAITED))
        plan = step.finish(next(self._plan_indices))
        for sequence in dict.fromkeys(step.sequences):
            if sequence.is_planned:
                self._queues.close(sequence)
        return plan

    def _selected(self, open_groups: Collection[int]) -> Step:
        step = Step(
            self._queues,
            self._kv,
            self.policy,
            self.lengths,
            self.speculation,
            self._clock.now,
            open_groups,
        )
        self.policy.iteration.select(step, self._policy_state)
        return step

    def plan_flush(self, free_share: float = 1.0) -> StepPlan | None:
        """Return a plan of the copies of `KVManager.flush`; None if none is left."""
        states, pages = self._kv.flush(free_share)
        if not (states or pages):
            return None
        return StepPlan(index=next(self._plan_indices), saves=states, swaps_out=pages)

    def apply(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Apply what `plan` delivered; return the news in the order of the rows."""
        news, live = [], []
        for index, handover in enumerate(plan.handovers):
            sequence = self._sequences[handover.sequence_key]
            is_lost = result.arrived is not None and not result.arrived[index]
            if self._arrive(sequence, handover, is_lost=is_lost):
                news.append(Progress(sequence, 0))
        for index, row in enumerate(plan.rows):
            sequence = self._sequences[row.sequence_key]
            sequence.read()
            if sequence.phase is Phase.FINISHED:
                if sequence.num_in_flight == 0:
                    del self._sequences[sequence.key]
                continue
            news.append(Progress(sequence, self._take(sequence, index, plan, result)))
            if sequence.num_in_flight == 0:
                self._kv.all_read(sequence)
                if sequence.phase is Phase.CLOSING:  # fewer tokens came than it was closed for
                    self._kv.reopen(sequence)
                    self._queues.wait(sequence)
            live.append((index, sequence))
        self.lengths.refine(plan, result, live)
        return news

    def _arrive(self, sequence: Sequence, handover: Handover, *, is_lost: bool) -> bool:
        """Run a sequence where its KV is now, unless it was preempted or ended meanwhile.

        If its pages are lost, it is recomputed, or ends after several losses; then return True.
        """
        sequence.read()
        if sequence.phase is Phase.FINISHED:
            del self._sequences[sequence.key]
        elif sequence.phase is Phase.RUNNING and not is_lost:
            sequence.handed_over(is_lost=False)
            self._queues.arrive(sequence, handover.target)
        elif sequence.phase is Phase.RUNNING:
            self._num_handovers_lost += 1
            sequence.handed_over(is_lost=True)
            if sequence.num_lost == MAX_LOST_HANDOVERS:
                self.end(sequence, "error", not_handed_over(sequence))
                return True
            self._queues.preempt(sequence)
        return False

    def _take(self, sequence: Sequence, index: int, plan: StepPlan, result: StepResult) -> int:
        row = plan.rows[index]
        count = take_results(sequence, row, index, result)
        if count and sequence.times.first_token_s is None:
            sequence.times.set_first_token(self._clock.now())
        if not result.finite[index]:
            self.end(sequence, "error", not_finite(sequence))
        elif reason := end_of(sequence, has_new=count > 0):
            self._end(sequence, reason)
        elif count < row.max_new_tokens:
            self._take_back(sequence, row.max_new_tokens - count)
        return count

    def _take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Plan a sequence's next tokens again: fewer came, although it has not ended."""
        sequence.take_back(num_tokens)
        self._num_taken_back += num_tokens
        self._kv.take_back(sequence, num_tokens)

    # ---- another schedule, another pool ----

    def adopt(self, iteration: IterationShape[Any]) -> None:
        """Plan by another iteration shape, or by other settings of the same one, from now on.

        Every sequence continues, and steps in flight stay valid. A shape of the same kind continues
        with the present state, so that another encode phase does not cut RRA's decode phase short;
        a shape of another kind begins with a state of its own. The policy's other choices stay.

        Raises:
          InvalidConfigError: it plans for another number of device groups.
        """
        check_groups(iteration, self.policy)
        self.policy = replace(self.policy, iteration=iteration)
        state = self.policy.new_state()
        if type(state) is not type(self._policy_state):
            self._policy_state = state

    def make_room(self, num_pages: int) -> list[tuple[int, int]]:
        """Preempt until all reservations fit into `num_pages` pages; nothing may be in flight.

        The last in order are preempted first; and those whose length limit a pool of this size
        changes, because the device knows it from their admission. Return the fewest (from, to)
        moves of pages, to be carried out and then passed to `resize`.
        """
        config = self._kv.config_with(num_pages)
        for sequence in tuple(reversed(self.running)):
            if max_length(sequence.request, config) != sequence.max_length:
                self._queues.preempt(sequence)
        while not self._kv.fits(num_pages):
            self._queues.preempt(self.running[-1])
        return self._kv.shrink(num_pages)

    def resize(self, num_pages: int, moves: Moves) -> None:
        """Switch to a pool of `num_pages` pages, after `make_room` for them.

        A waiting sequence gets the length limit of a new one. Without room for its next token it
        fails with PromptTooLongError, as a new one would.
        """
        self._kv.resize(num_pages, moves, self.running)
        for sequence in self.waiting:
            sequence.limit(max_length(sequence.request, self.config))
            self._fail_if_too_long(sequence)
        self._queues.waiting.sort()

    def _fail_if_too_long(self, sequence: Sequence) -> None:
        if sequence.num_outputs_left < (sequence.pooled is None):
            self.end(sequence, "error", too_long(sequence, self.config))

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of docs/architecture.md is broken."""
        self._queues.check_integrity()
        self._kv.check_integrity(self._sequences.values())
        for sequence in self._sequences.values():
            sequence.check_integrity()
