"""Alternates an encode phase with a fixed number of decode iterations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.iteration.encode_batch import (
    EncodeBatch,
    Ratio,
    Workload,
    admissions,
    first_urgent,
)
from jaxserve.scheduling.policy import StepBuilder
from jaxserve.scheduling.sequence import Phase, Sequence


@final
@dataclass
class Round:
    """The encode phase and the decode phase that a scheduler is in.

    The decode phase `is_extended` while no sequence waits. `batch` was admitted by the encode
    phase; `decoding` began the decode phase, and `ended_share` of them ended in it: the measured
    sum of P_D(U).
    """

    is_encoding: bool = False
    num_iterations_left: int = 0
    is_extended: bool = False
    batch: EncodeBatch = field(default_factory=EncodeBatch)
    decoding: tuple[Sequence, ...] = ()
    ended_share: Ratio = field(default_factory=Ratio)


@final
@dataclass(frozen=True, kw_only=True)
class RRA:
    """ExeGPT's schedule for round-robin allocation (sections 4.1 and 5.2 of the paper).

    An encode phase computes the prompts of about `encode_batch` sequences, in as many mixed steps
    as they need, while running answers wait. A decode phase of `decode_iterations` follows, in
    decode loops. So prompts delay answers at known times only, and a batch of answers neither
    shrinks nor grows on average.

    - Results are read before an encode phase begins, because its size depends on how many answers
      have ended. The device idles for that long, once a round.
    - If no sequence waits then, decoding continues until one does. If all answers end, the next
      encode phase begins at once. An encode phase takes what waits, however few.
    - The number of sequences is adjusted as `Workload` says.
    - A sequence with a latency bound of its own does not wait for an encode phase. The step after
      those in flight computes its prompt and one token of each running answer. Other sequences are
      preempted if it finds no slot or memory. Beyond `reserved_slots` it counts as a running
      sequence in the next encode phase.

    Attributes:
      encode_batch: B_E, sequences of an encode phase on average.
      decode_iterations: N_D, decode iterations between two encode phases.
      encode_tokens: tokens of an encode phase on average; None to measure them.
      decode_batch: B_D, sequences that run at the beginning of a decode phase on average; fewer do
        at its end. None to take B_E over the measured share of sequences that end in a decode
        phase, which is how the paper sets it.
      threshold: as in `Workload`.
      reserved_slots: slots that only sequences with a latency bound of their own may take.
    """

    num_device_groups: ClassVar[int] = 1
    makes_way = True

    encode_batch: int
    decode_iterations: int
    encode_tokens: float | None = None
    decode_batch: float | None = None
    threshold: float = 0.1
    reserved_slots: int = 0

    def __post_init__(self) -> None:
        if self.decode_iterations < 1:
            raise InvalidConfigError(
                f"decode_iterations={self.decode_iterations} is not allowed; pass at least 1"
            )
        if self.reserved_slots < 0:
            raise InvalidConfigError(
                f"reserved_slots={self.reserved_slots} is not allowed; pass at least 0"
            )
        self._planned()

    def new_state(self) -> Round:
        return Round()

    def select(self, step: StepBuilder, state: Round) -> None:
        # The phase may have begun under other settings (`Scheduler.adopt`).
        state.num_iterations_left = min(state.num_iterations_left, self.decode_iterations)
        if not state.is_encoding or not step.running:
            is_due = not (state.num_iterations_left and step.decoding)
            if not is_due or not (step.waiting or step.prefilling):
                state.is_extended |= is_due
                if not self._encode_urgent(step, state):
                    self._decode(step, state)
                return
            if any(sequence.num_in_flight for sequence in step.running):
                return
            _begin(state)
        self._encode(step, state)
        if step.num_tokens_left == step.config.max_step_tokens:
            state.is_encoding = False
            state.num_iterations_left = self.decode_iterations
            state.decoding = tuple(step.running)
            self._decode(step, state)

    def _encode(self, step: StepBuilder, state: Round) -> None:
        for sequence in step.prefilling:
            if step.num_tokens_left == 0:
                return
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        workload = self._workload(state)
        for sequence in admissions(step, state.batch, workload, self.reserved_slots):
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))

    def _encode_urgent(self, step: StepBuilder, state: Round) -> bool:
        """Compute prompts with a bound in the middle of a decode phase; False without any."""
        prefilling = step.prefilling
        if not prefilling and first_urgent(step, self.reserved_slots) is None:
            return False
        step.add_decoding()
        state.num_iterations_left = max(0, state.num_iterations_left - 1)
        for sequence in prefilling:
            if step.num_tokens_left:
                step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        while step.num_tokens_left and first_urgent(step, self.reserved_slots):
            if sequence := step.admit(only_bounded=True):
                step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        return True

    def _decode(self, step: StepBuilder, state: Round) -> None:
        wanted = state.num_iterations_left or self.decode_iterations
        num = step.add_decode_loop(min(wanted, step.config.max_decode_iterations))
        state.num_iterations_left = max(0, state.num_iterations_left - num)

    def _planned(self) -> Workload:
        return Workload(
            encode_batch=self.encode_batch,
            encode_tokens=self.encode_tokens,
            decode_batch=self.decode_batch,
            threshold=self.threshold,
        )

    def _workload(self, state: Round) -> Workload:
        """Return the planned workload, with the measured decode batch if none was planned."""
        planned = self._planned()
        share = state.ended_share.value
        if self.decode_batch is not None or not share:
            return planned
        return replace(planned, decode_batch=self.encode_batch / share)


def _begin(state: Round) -> None:
    """Begin an encode phase; no token of the decode phase before it is in flight."""
    if state.decoding and not state.is_extended:
        ended = [s for s in state.decoding if s.phase in (Phase.CLOSING, Phase.FINISHED)]
        state.ended_share.add(len(ended), len(state.decoding))
    state.is_encoding, state.is_extended = True, False
    state.decoding = ()
    state.batch.begin()
