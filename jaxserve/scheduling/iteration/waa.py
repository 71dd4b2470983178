"""Prompts on one group of devices, answers on another: ExeGPT's WAA, or disaggregated prefill.

How a sequence passes through the groups:

1. It is admitted into a slot of the encode group, and its pages are reserved. A page has the same
   number, and so one owner, in both groups' memories; `KVManager` alone writes the page table.
2. Steps of the encode group compute its prompt, and choose its first token.
3. When those have been read, the link copies its pages into the decode group's memory, while both
   groups compute. There is room, because slots and pages are counted over both groups.
4. When the copy has been read, it moves to a slot of the decode group, whose next step admits it
   there with the tokens that it has by then.
5. A sequence that is preempted begins again at 1.

A sequence with a latency bound of its own goes first in the next encode batch, and other ones are
preempted if it finds no slot or memory.

Each group, and the link, has its own steps in flight, so none waits for another. Micro-batches of
the decode group are its executor's: it cuts a step into parts that run in its stages at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.iteration.encode_batch import EncodeBatch, Workload, admissions
from jaxserve.scheduling.plan import LINK
from jaxserve.scheduling.policy import StepBuilder

ENCODE, DECODE = 0, 1
NUM_GROUPS = 2


@final
@dataclass(frozen=True, kw_only=True)
class WAA:
    """ExeGPT's schedule for workload-aware allocation (sections 4.1 and 5.2 of the paper).

    The encode group computes one batch of prompts after another. The decode group computes the next
    tokens of all answers that have been handed over to it.

    Attributes:
      encode_batch: B_E, sequences of an encode batch on average.
      encode_tokens: tokens of an encode batch on average; None to measure them.
      decode_batch: B_D, sequences that run on average, those of the encode group included; None for
        as many as slots and memory allow.
      threshold: as in `Workload`.
      decode_iterations: iterations of a decode step, which a sequence that was handed over may have
        to wait for. 1 in the paper; more take less of the host's time.
      reserved_slots: slots that only sequences with a latency bound of their own may take.
    """

    num_device_groups: ClassVar[int] = NUM_GROUPS
    makes_way = True

    encode_batch: int
    encode_tokens: float | None = None
    decode_batch: float | None = None
    threshold: float = 0.1
    decode_iterations: int = 1
    reserved_slots: int = 0

    def __post_init__(self) -> None:
        for name, least in (("decode_iterations", 1), ("reserved_slots", 0)):
            if getattr(self, name) < least:
                raise InvalidConfigError(
                    f"{name}={getattr(self, name)} is not allowed; pass at least {least}"
                )
        self._workload()

    def new_state(self) -> EncodeBatch:
        return EncodeBatch()

    def select(self, step: StepBuilder, state: EncodeBatch) -> None:
        if LINK in step.open_groups and self._hand_over(step):
            return
        if DECODE in step.open_groups:
            step.use_group(DECODE)
            if step.add_decode_loop(min(self.decode_iterations, step.config.max_decode_iterations)):
                return
        if ENCODE in step.open_groups:
            step.use_group(ENCODE)
            self._encode(step, state)

    def _hand_over(self, step: StepBuilder) -> bool:
        """Hand over every sequence whose prompt was computed and read; False without any."""
        computed = [
            sequence
            for sequence in step.running
            if sequence.kv.group == ENCODE and sequence.is_decoding
            if not sequence.num_in_flight
        ]
        for sequence in computed:
            step.hand_over(sequence, DECODE)
        return bool(computed)

    def _encode(self, step: StepBuilder, batch: EncodeBatch) -> None:
        prefilling = step.prefilling
        if not prefilling:
            batch.begin()
        for sequence in prefilling:
            if step.num_tokens_left == 0:
                return
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))
        for sequence in admissions(step, batch, self._workload(), self.reserved_slots):
            step.add_row(sequence, min(sequence.num_uncomputed, step.num_tokens_left))

    def _workload(self) -> Workload:
        return Workload(
            encode_batch=self.encode_batch,
            encode_tokens=self.encode_tokens,
            decode_batch=self.decode_batch,
            threshold=self.threshold,
        )
