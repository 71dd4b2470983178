"""How many sequences an encode batch takes, to balance encoding and decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.policy import StepBuilder
from jaxserve.scheduling.sequence import Sequence

# Weight of earlier batches in an average when a new one comes.
_KEPT = 31 / 32


@final
@dataclass
class Ratio:
    """A ratio of two counts, measured batch by batch; the last 32 batches count most."""

    numerator: float = 0.0
    denominator: float = 0.0

    def add(self, numerator: float, denominator: float) -> None:
        self.numerator = _KEPT * self.numerator + numerator
        self.denominator = _KEPT * self.denominator + denominator

    @property
    def value(self) -> float | None:
        return self.numerator / self.denominator if self.denominator else None


def tokens_to_encode(sequence: Sequence) -> int:
    """Return a waiting sequence's tokens without KV, less an encoder prompt's padding and start."""
    request = sequence.request
    return sequence.num_uncomputed - (request.num_padding + 1 if request.num_encoded else 0)


@final
@dataclass
class EncodeBatch:
    """The sequences of the present encode batch, and the averages of earlier ones.

    Tokens are those without KV before the admission, so cached prefixes count too.
    """

    num_sequences: int = 0
    num_tokens: int = 0
    mean_tokens: Ratio = field(default_factory=Ratio)

    def begin(self) -> None:
        """Begin another batch; from now on the one before counts in the average."""
        if self.num_sequences:
            self.mean_tokens.add(self.num_tokens, self.num_sequences)
        self.num_sequences = self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        self.num_sequences += 1
        self.num_tokens += num_tokens


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes that a schedule keeps even from batch to batch (section 5.2 of ExeGPT).

    An encode batch has `encode_batch` sequences. It takes more while its tokens, or the running
    sequences, are too few; it takes fewer if its tokens or the running sequences would become too
    many. The upper bounds come first, so no encode batch is much above the average: if too few
    sequences run, the average counts as higher by the threshold, and their number rises over
    several batches. A prompt that leads from too few tokens to too many is taken if it brings them
    nearer to the average. If nothing runs, one sequence is taken in any case.

    The paper does not say how far a batch may differ from the average. Its table 7 has encoding
    times within 7 to 12 %, with adjustment; so the default is 10 %.

    Attributes:
      encode_batch: B_E, sequences of an encode batch on average.
      encode_tokens: tokens of an encode batch on average; None to use the measured ones.
      decode_batch: B_D, running sequences after an encode batch on average; None if unknown.
      threshold: share of the average by which tokens and running sequences may differ from it.
    """

    encode_batch: int
    encode_tokens: float | None = None
    decode_batch: float | None = None
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.encode_batch < 1:
            raise InvalidConfigError(
                f"encode_batch={self.encode_batch} is not allowed; pass at least 1"
            )
        for name in ("encode_tokens", "decode_batch"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidConfigError(
                    f"{name}={value} is not allowed; pass a number over 0, or None to have it "
                    "measured"
                )
        if not 0 <= self.threshold < 1:
            raise InvalidConfigError(
                f"threshold={self.threshold} is not allowed; pass a share of at least 0 and "
                "less than 1"
            )

    def next_of(self, step: StepBuilder, batch: EncodeBatch, num_running: int) -> Sequence | None:
        """Admit the next sequence into the batch, with `num_running` outside of reserved slots."""
        candidate = step.first_admissible()
        if candidate is None:
            return None
        num_tokens = tokens_to_encode(candidate)
        if not self._takes(num_tokens, num_running, batch):
            return None
        batch.add(num_tokens)
        return step.admit()

    def _takes(self, num_tokens: int, num_running: int, batch: EncodeBatch) -> bool:
        if not num_running:
            return True
        least, most = 1 - self.threshold, 1 + self.threshold
        level = self.decode_batch
        if level is not None and num_running + 1 > most * level:
            return False
        work = self._encode_tokens(batch)
        if work is None:
            return batch.num_sequences < self.encode_batch
        if level is not None and num_running < least * level:
            work *= most
        with_it = batch.num_tokens + num_tokens
        is_nearer = with_it - work < work - batch.num_tokens
        if with_it > most * work and batch.num_sequences and not is_nearer:
            return False
        if batch.num_sequences < self.encode_batch or batch.num_tokens < least * work:
            return True
        return level is not None and num_running < least * level

    def _encode_tokens(self, batch: EncodeBatch) -> float | None:
        if self.encode_tokens is not None:
            return self.encode_tokens
        mean = batch.mean_tokens.value
        return None if mean is None else mean * self.encode_batch


def first_urgent(step: StepBuilder, reserved_slots: int) -> Sequence | None:
    """Return the first waiting sequence with a bound that may begin now, making way for it.

    If one without a bound that has waited long is before it, it may have a reserved slot.
    """
    sequence = step.make_way()
    if sequence is not None or not reserved_slots:
        return sequence
    num_bounded = len(step.running) - _num_without_bounds(step)
    return step.first_admissible(only_bounded=True) if num_bounded < reserved_slots else None


def admissions(
    step: StepBuilder, batch: EncodeBatch, workload: Workload, reserved_slots: int
) -> Iterator[Sequence]:
    """Admit sequences into an encode batch, one by one, while the step takes tokens.

    Those with a bound come first, whatever the workload; other sequences are preempted if they find
    no slot or memory. `reserved_slots` are for these alone; one slot is always for sequences
    without.
    """
    most = max(1, step.config.max_slots - reserved_slots)
    num_others = _num_without_bounds(step)
    while step.num_tokens_left:
        sequence = first_urgent(step, reserved_slots)
        if sequence is not None:
            batch.add(tokens_to_encode(sequence))
            sequence = step.admit(only_bounded=True)
            num_others = _num_without_bounds(step)
        elif num_others < most:
            num_running = max(num_others, len(step.running) - reserved_slots)
            sequence = workload.next_of(step, batch, num_running)
            num_others += sequence is not None and not sequence.request.has_bounds
        if sequence is None:
            return
        yield sequence


def _num_without_bounds(step: StepBuilder) -> int:
    return sum(not each.request.has_bounds for each in step.running)
