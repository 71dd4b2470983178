"""The five choices of a policy, as protocols; a preset names one of each.

Each is a frozen dataclass of settings, and one policy may drive any number of schedulers. What an
iteration shape keeps from step to step is in a state that it makes itself (`new_state`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.eviction import Eviction
from jaxserve.memory.snapshots import StateRetention
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.retention import Stateless
from jaxserve.scheduling.sequence import Sequence

_State = TypeVar("_State")


# Returns the decode iterations that take as long as to preempt a full pool and to bring it back: by
# copies, or by recomputation. None if costs or step times are not measured.
PreemptionCost: TypeAlias = Callable[[], float | None]


class Headroom(Protocol):
    """The pages that an admission leaves available in one step, so that running sequences can grow.

    It covers the sequences that run, and those that were admitted since.
    """

    def pages(self, sequence: Sequence, following: Callable[[], Iterable[Sequence]] = tuple) -> int:
        """Return the pages that must stay available after the admission of a sequence.

        Args:
          following: returns waiting sequences that may be admitted next in the step, so that their
            needs can be computed together.
        """
        ...

    def admitted(self, sequence: Sequence) -> None:
        """Count a sequence among those that run; its reservation is made."""
        ...

    def advanced(self) -> None:
        """Record that running sequences have reserved more pages in this step."""
        ...


class AdmissionPolicy(Protocol):
    """How much memory to reserve for a sequence."""

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        """Return the tokens to reserve before the sequence runs; at least one more than it has.

        For a waiting sequence the number changes only with `lengths.estimate` and with the fields
        of the sequence that change when it is preempted.
        """
        ...

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Headroom:
        """Return what admissions leave available in a step, given the sequences that run."""
        ...

    @property
    def extends(self) -> bool:
        """Whether a sequence that outgrows its reservation may take more pages.

        If not, it is preempted, and its next reservation is computed again.
        """
        ...


class Order(Protocol):
    """Which sequence goes first.

    Attributes:
      heeds_bounds: requests with a latency bound of their own go before the rest, so that a plan
        may reserve slots for them.
      heeds_priority: `Request.priority` has an effect.
    """

    heeds_bounds: ClassVar[bool]
    heeds_priority: ClassVar[bool]

    def key(self, sequence: Sequence, lengths: LengthTracker) -> Any:
        """Return the sort key of a sequence: a total order.

        The key is computed when the sequence begins to wait, at its submission and after each
        preemption, and again when its length limit or its output is reset. It is stored while the
        sequence waits and runs, so it may depend on what changes meanwhile.
        """
        ...

    @property
    def max_passes(self) -> int:
        """How many sequences may be admitted before one ahead of them that does not fit."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class QueueView:
    """What an `OrderState` sees of one scheduler before a step is planned.

    Attributes:
      waiting, running: sequences without and with a slot; `num_waiting` without.
      expected_arrivals: as `StepBuilder.expected_arrivals`.
    """

    waiting: Iterable[Sequence]
    num_waiting: int
    running: Seq[Sequence]
    lengths: LengthTracker
    now_s: float
    expected_arrivals: Callable[[], tuple[float, float] | None]


class OrderState(Protocol):
    """The keys of one scheduler's sequences under a `ServiceOrder`."""

    def key(self, sequence: Sequence, lengths: LengthTracker) -> Any:
        """Return the present sort key of a sequence: a total order.

        Every sequence comes here first at its submission.
        """
        ...

    def update(self, queue: QueueView) -> bool:
        """Take in what was planned since the last call; return whether the order may change.

        It is called before each step. If it returns True, all keys are computed again.
        """
        ...


class ServiceOrder(ABC):
    """An order by what sequences have had so far, or will need, whose keys change meanwhile.

    Its settings are frozen, as those of any `Order`, and a state serves one scheduler. New keys
    cost a look at every sequence that waits.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False
    max_passes: ClassVar[int] = 0

    @abstractmethod
    def new_state(self) -> OrderState: ...


class Preemption(Protocol):
    """Which sequence is preempted when memory runs out, and what happens to its KV."""

    def ranked(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
        """Return the candidates in the order in which they are preempted.

        It is called once a step, and holds for each preemption of that step.

        Args:
          candidates: in the policy's order; the very first that runs is never among them.
        """
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether its KV is swapped out, not recomputed, if there is room and that costs less."""
        ...


class Holding(Protocol):
    """How long the device keeps the pages of a conversation for its next turn alone.

    Attributes:
      token_s: seconds that the recomputation of a token takes.
    """

    @property
    def token_s(self) -> float: ...

    def hold_s(self, pauses_s: Seq[float], saved_s: float) -> float:
        """Return the seconds from the end of a turn; 0 for none.

        Args:
          pauses_s: the newest pauses between two turns, of all conversations; at most 1,000.
          saved_s: seconds that the next turn saves if it comes meanwhile: the recomputation of its
            pages, and the mean time that requests wait for their admission.
        """
        ...


class Retention(Protocol):
    """What happens to a sequence's pages after its answer.

    Attributes:
      keeps_pages: later sequences that begin with the same tokens can find them.
      uses_host: they move to the host when the device has no room for them.
    """

    keeps_pages: ClassVar[bool]
    uses_host: ClassVar[bool]

    @property
    def learns_reuse(self) -> bool:
        """Whether pages are copied to the host only while they come back often (`PageValues`)."""
        ...

    @property
    def free_share(self) -> float:
        """Share of the pool: if less can be taken without loss, pages are copied ahead of time."""
        ...

    @property
    def eviction(self) -> Eviction:
        """Which pages go first."""
        ...

    @property
    def states(self) -> StateRetention:
        """Which states of recurrent layers are kept, if pages are."""
        ...

    @property
    def holding(self) -> Holding | None:
        """Keeps pages of conversations between their turns; None if any request may have them."""
        ...


# The most sequences that one step admits. Their prompts keep a device busy, and the host has a
# bounded time to admit them, before the step that the device computes meanwhile ends.
MAX_ADMITTED = 32


class StepBuilder(Protocol):
    """What an iteration shape may do to the step being planned."""

    config: EngineConfig

    @property
    def now_s(self) -> float:
        """The engine's clock."""
        ...

    @property
    def running(self) -> Seq[Sequence]:
        """Every sequence with a slot in any device group, in order."""
        ...

    @property
    def decoding(self) -> Seq[Sequence]:
        """Sequences that run in this step's group with only output to compute, in order.

        One whose newest token has to be read first (`Sequence.awaits_tokens`) is not included.
        """
        ...

    @property
    def prefilling(self) -> Seq[Sequence]:
        """Sequences that run in this step's group with a part of their prompt to compute."""
        ...

    @property
    def open_groups(self) -> Collection[int]:
        """Device groups that may be given a step now; `plan.LINK` for the link between them."""
        ...

    @property
    def waiting(self) -> Seq[Sequence]:
        """Sequences that wait for a slot or memory, in order; no more than there are slots."""
        ...

    @property
    def has_waiting(self) -> bool:
        """Whether `waiting` has any."""
        ...

    def expected_arrivals(self) -> tuple[float, float] | None:
        """Return the expected requests a second, and the seconds of a decode iteration.

        None if no request arrives during other requests' steps, or no step was timed.
        """
        ...

    @property
    def num_tokens_left(self) -> int:
        """Tokens that still fit in this step."""
        ...

    def first_admissible(self, *, only_bounded: bool = False) -> Sequence | None:
        """Return the sequence that `admit` would admit now; None if there is none.

        A sequence without a latency bound of its own may have to wait for running ones with one
        (`scheduling.slack`); the first one with a bound passes it then. `only_bounded` passes all
        without a bound, too.
        """
        ...

    def fetch_next(self) -> None:
        """Read from the disk what the first waiting sequence will need, as an admission does."""
        ...

    def make_way(self, *, only_bounded: bool = True) -> Sequence | None:
        """Return the first waiting sequence if it has a latency bound of its own and is admissible.

        Sequences after it in order that have no bound are preempted, the last first, until it is.
        None if it has no bound, awaits pages from the disk, or no more sequences can be preempted.
        Without `only_bounded` this is so for any first sequence, and for any after it in order.
        """
        ...

    def admit(self, *, only_bounded: bool = False) -> Sequence | None:
        """Give the first waiting sequence that fits a slot and its reservation, and return it.

        None if there is none, or it may not pass those before it, or the step has admitted
        `MAX_ADMITTED`.
        """
        ...

    def add_decoding(self) -> None:
        """Add the next token of every decoding sequence, like `add_row` for each.

        Forced tokens before it, which were not computed yet, are added as far as they fit.
        """
        ...

    def expected_ends(self, num_iterations: int) -> Seq[float] | None:
        """Return how many decoding sequences are expected to have ended after 1, 2, ... iterations.

        None if nothing was predicted of them.
        """
        ...

    def add_row(self, sequence: Sequence, num_tokens: int) -> bool:
        """Add the sequence's next `num_tokens` tokens to a mixed step.

        Takes pages, preempting later sequences if too few are free; False when the sequence itself
        had to be preempted. An encoder's prompt is never cut: it is added whole, whatever
        `num_tokens` says. If it does not fit, this is False and no tokens are left in the step; the
        first prompt of a step always fits.
        """
        ...

    def add_decode_loop(
        self, max_iterations: int, *, compacts: bool = True, min_rows: int = 0
    ) -> int:
        """Make this step a decode loop over every decoding sequence.

        Runs as many iterations as fit in memory, at most `max_iterations` and never past the first
        sequence's length limit. If a sequence awaits its tokens, it is a mixed step of one
        iteration, as `add_decoding` makes it. While such a token is in flight, the loop leaves out
        all sequences of this kind, so that they continue together, and has one iteration, so that
        they continue soon.

        Args:
          compacts: bring the live slots together first, so that fewer rows are computed.
          min_rows: rows to compute at least, with or without sequences.

        Returns:
          The loop's iterations; 0 if no sequence may decode.
        """
        ...

    def add_decode_loop_of(self, sequence: Sequence, max_iterations: int) -> bool:
        """Make this step a decode loop over one sequence alone; False if it had to be preempted."""
        ...

    def use_group(self, group: int) -> None:
        """Make this a step of one of `open_groups`, before it has rows; the default is group 0."""
        ...

    def hand_over(self, sequence: Sequence, target: int) -> None:
        """Copy a sequence's KV through the link to another group, where it runs from then on.

        All of its steps have been read. No other step of it is planned before the copy is done.
        """
        ...

    def wait_until(self, time_s: float) -> None:
        """Leave the step empty although sequences wait: plan again at this time, or at news."""
        ...


class IterationShape(Protocol[_State]):
    """Which sequences advance in the next step, and by how much.

    Attributes:
      num_device_groups: groups of devices that it plans for, each with a copy of the parameters and
        a page pool. Sequences begin in group 0.
      makes_way: whether it calls `StepBuilder.make_way`, so that a request with a latency bound of
        its own does not wait for running sequences without one.
      reserved_slots: slots that only sequences with such a bound may take.
    """

    num_device_groups: ClassVar[int]

    @property
    def makes_way(self) -> bool: ...

    @property
    def reserved_slots(self) -> int: ...

    def new_state(self) -> _State:
        """Return what the shape keeps from step to step, for a new scheduler; None for nothing."""
        ...

    def select(self, step: StepBuilder, state: _State) -> None:
        """Fill `step`; leaving it empty means that there is nothing to do.

        Called again, with a new step, if all that could have run had to be preempted. `state` is
        the scheduler's own, from `new_state`; it is changed in place.
        """
        ...


@final
@dataclass(frozen=True)
class Policy:
    """A named combination of the five choices.

    Attributes:
      is_planned: whether a runtime replaces the iteration shape by schedules that it finds itself,
        once it knows lengths and step times (`docs/latency_bounds.md`).
      families: of schedules, such as "rra" or "waa_m", to which plans are limited unless other ones
        are requested; empty for no limit.

    Raises:
      InvalidConfigError: several device groups, and KV that would stay in one of them.
    """

    name: str
    admission: AdmissionPolicy
    order: Order | ServiceOrder
    iteration: IterationShape[Any]
    retention: Retention
    preemption: Preemption = LastInOrder()
    is_planned: bool = False
    families: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keeps = self.retention.keeps_pages or self.preemption.keeps_state
        if self.num_device_groups > 1 and keeps:
            raise InvalidConfigError(
                f"policy {self.name!r} has {self.num_device_groups} device groups and keeps KV of "
                "ended or preempted sequences, which a group could not read in another one's "
                "memory; pass retention=Stateless() and LastInOrder(keeps_state=False)"
            )

    @property
    def num_device_groups(self) -> int:
        return self.iteration.num_device_groups

    def retention_for(self, config: EngineConfig) -> Retention:
        """Return what is kept after answers; nothing if states are not kept with the pages."""
        keeps_part = config.has_slot_state and not config.num_snapshots
        return Stateless() if keeps_part else self.retention

    def new_state(self) -> Any:
        return self.iteration.new_state()
