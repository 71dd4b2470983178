"""An executor without a device: a virtual clock, and a model that reads its context.

The simulated model's next token is a hash of the context *as read through the page table*. A page
that was lost, overwritten or shared wrongly changes the tokens. Thousands of cases per second can
therefore test whether scheduling and memory are correct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.execution.executor import Executor
from jaxserve.execution.step_cost import FlatCost, StepCost, StepWork
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_pool import NULL_PAGE, Moves, page_sources, page_targets
from jaxserve.memory.snapshots import StateCopy
from jaxserve.predictor import Refinement
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import ProposalCount, Row, StepPlan, StepResult, nothing_computed

END_TOKEN = 0

# (request, sample index) -> number of output tokens after which the model ends the answer
AnswerLength = Callable[[Request, int], int]
# (request, sample index, number of the sequence's tokens) -> number of tokens that its next row
# delivers, of those that it may deliver
Accepted = Callable[[Request, int, int], int]
# (request, sample index, number of output tokens) -> logits of what remains, float [buckets]
Reading = Callable[[Request, int, int], np.ndarray]

_MASK = (1 << 61) - 1


def mix(a: int, b: int) -> int:
    value = (a * 6364136223846793005 + b * 1442695040888963407 + 1013904223) & _MASK
    return (value ^ (value >> 29)) & _MASK


def _mix_all(a: np.ndarray, b: int) -> np.ndarray:
    """Return `mix` of each element."""
    constant = np.uint64((b * 1442695040888963407 + 1013904223) % 2**64)
    value = a.astype(np.uint64) * np.uint64(6364136223846793005) + constant & np.uint64(_MASK)
    return (value ^ (value >> np.uint64(29))).astype(np.int64)


@final
class SimulatedHandle:
    """A step that is ready at its virtual time; collecting it advances the clock."""

    def __init__(self, result: StepResult, ready_s: float, clock: VirtualClock):
        self._result, self._ready_s, self._clock = result, ready_s, clock

    def is_ready(self) -> bool:
        return self._clock.now() >= self._ready_s

    def collect(self) -> StepResult:
        self._clock.advance_to(self._ready_s)
        return self._result


@final
@dataclass
class _HostRows:
    """The `HostMemory` of rows of numbers, [entries, numbers]."""

    rows: np.ndarray
    fingerprint: Callable[[], bytes]

    @property
    def entry_bytes(self) -> int:
        return self.rows[0].nbytes

    def has_arrived(self, entry: int) -> bool:
        return True

    def read(self, entry: int) -> bytes:
        return self.rows[entry].tobytes()

    def write(self, entry: int, contents: bytes) -> None:
        self.rows[entry] = np.frombuffer(contents, np.int64)


@final
@dataclass
class _Slot:
    tokens: list[int]
    request: Request
    sample_index: int
    max_length: int
    is_inert: bool = False
    page_table: dict[int, int] = field(default_factory=dict)
    num_in_state: int = 0  # tokens, of a model with states in slots
    state: int = 1  # what the model has of these tokens

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@final
class SimulatedExecutor(Executor):
    """An executor that computes a plan at once and delivers the result at its virtual time.

    There are two device groups. Each has its own pages, slots and timeline: its plans run one after
    the other, at the same time as the other group's plans. Handovers run on the link in the same
    way.

    Args:
      clock: clock that `submit` advances by the host's work, and `collect` to the end of the step.
      answer_length: output length at which the model ends an answer; None for never.
      fault_length: output length from which the logits are not finite; None for never.
      accepted: number of tokens that a row delivers if it is fewer than it may, as in speculation
        and constrained decoding; None for rows that deliver all.
      vocab_size: size of the vocabulary; tokens are 1 to vocab_size - 1, and 0 is the end token.
      reads_context: whether tokens depend on their context. False is many times faster, for runs in
        which only lengths and times matter, but does not detect a wrong page table.
    """

    num_device_groups = 2

    def __init__(
        self,
        config: EngineConfig,
        clock: VirtualClock,
        *,
        answer_length: AnswerLength | None = None,
        fault_length: AnswerLength | None = None,
        accepted: Accepted | None = None,
        cost: StepCost | None = None,
        swap_costs: SwapCosts | None = None,
        refinement: Refinement | None = None,
        reading: Reading | None = None,
        vocab_size: int = 1000,
        reads_context: bool = True,
    ):
        self.config = config
        self.refinement = refinement
        self._swap_costs = swap_costs
        self._reading = reading
        self._clock = clock
        self._answer_length = answer_length
        self._fault_length = fault_length
        self._accepted = accepted
        self._cost = cost or FlatCost()
        self._vocab_size = vocab_size
        self._reads_context = reads_context
        # For each device group. The value at (page, offset) is a hash of the context up to it.
        self._slots_of: list[dict[int, _Slot]] = [{} for _ in range(self.num_device_groups)]
        shape = self.num_device_groups, config.num_pages, config.page_size
        self._cells_of = np.zeros(shape, np.int64)
        # The pages and slots of the group whose plan is being carried out.
        self._slots, self._cells = self._slots_of[0], self._cells_of[0]
        # The number of tokens in each snapshot, its state, and the page that follows the full ones.
        num_each = 2 + config.page_size
        self._snapshots = np.zeros((config.num_snapshots, num_each), np.int64)
        self._host_snapshots = np.zeros((config.num_host_snapshots, num_each), np.int64)
        self._host_cells = np.zeros((config.num_host_pages, config.page_size), np.int64)
        # Keys are device groups and the link.
        self._free_at_s: dict[int, float] = {}

    @property
    def swap_costs(self) -> SwapCosts | None:
        return self._swap_costs

    @property
    def host_memory(self) -> HostMemory | None:
        return _HostRows(self._host_cells, self.fingerprint) if self.config.num_host_pages else None

    @property
    def host_states(self) -> HostMemory | None:
        num = self.config.num_host_snapshots
        return _HostRows(self._host_snapshots, self.fingerprint) if num else None

    def submit(self, plan: StepPlan) -> SimulatedHandle:
        self._clock.advance_to(self._clock.now() + self._cost.host_s(plan))
        if plan.handovers:
            return self._hand_over(plan)
        self._slots, self._cells = self._slots_of[plan.group], self._cells_of[plan.group]
        self._save_states(plan)
        self._swap(plan)
        self._edit_slots(plan)
        shape = (len(plan.rows), plan.num_iterations * (1 + plan.num_proposed))
        result = StepResult(
            tokens=np.zeros(shape, np.int32),
            num_tokens=np.zeros(len(plan.rows), np.int32),
            finite=np.ones(len(plan.rows), np.bool_),
            proposals=self._no_proposals(plan),
            pooled={},
        )
        if plan.is_decode_loop and self._is_predictable:
            prefilled, decoded = 0, self._decode_at_once(plan, result)
        else:
            prefilled, decoded = self._iterate(plan, result)
        if self._reading is not None and plan.rows:
            result = replace(result, remaining=self._read_remaining(plan, self._reading))
        return self._handle(StepWork(plan, prefilled, tuple(decoded)), result)

    def _hand_over(self, plan: StepPlan) -> SimulatedHandle:
        for handover in plan.handovers:
            pages = list(handover.pages)
            self._cells_of[handover.target, pages] = self._cells_of[handover.source, pages]
        return self._handle(StepWork(plan, 0, ()), nothing_computed())

    def _handle(self, work: StepWork, result: StepResult) -> SimulatedHandle:
        group, now_s = work.plan.group, self._clock.now()
        begin_s = max(self._free_at_s.get(group, 0.0), now_s)
        work = work.beside(self._free_at_s, now_s, begin_s)
        ready_s = self._free_at_s[group] = begin_s + self._cost.device_s(work)
        self._clock.expect(ready_s)
        return SimulatedHandle(result, ready_s, self._clock)

    def fingerprint(self) -> bytes:
        return f"simulated {self.config.page_size}".encode()

    def _read_remaining(self, plan: StepPlan, reading: Reading) -> np.ndarray:
        """Return the probe's readings at the position before each row's newest token."""
        slots = [self._slots[row.slot] for row in plan.rows]
        return np.stack(
            [reading(s.request, s.sample_index, max(0, s.num_outputs - 1)) for s in slots]
        )

    def resize(self, num_pages: int, moves: Moves) -> None:
        old_num_pages = self.config.num_pages
        self._cells_of = self._cells_of[:, page_sources(old_num_pages, num_pages, moves)]
        targets = page_targets(old_num_pages, num_pages, moves)
        for slots in self._slots_of:
            for slot in slots.values():
                slot.page_table = {i: int(targets[page]) for i, page in slot.page_table.items()}
        self.config = replace(self.config, num_pages=num_pages)

    def reset(self) -> bool:
        self.close()
        return True

    def close(self) -> None:
        for slots in self._slots_of:
            slots.clear()

    def _swap(self, plan: StepPlan) -> None:
        for page, host_page in plan.swaps_out:
            self._host_cells[host_page] = self._cells[page]
        for host_page, page in plan.swaps_in:
            self._cells[page] = self._host_cells[host_page]

    def _save_states(self, plan: StepPlan) -> None:
        for copy in plan.saves:
            if isinstance(copy, StateCopy):
                source, page = self._slots[copy.slot], self._cells[copy.page]
                self._snapshots[copy.entry] = source.num_in_state, source.state, *page
            elif copy.goes_out:
                self._host_snapshots[copy.host_entry] = self._snapshots[copy.entry]
            else:
                self._snapshots[copy.entry] = self._host_snapshots[copy.host_entry]

    def _edit_slots(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            if slot in self._slots:  # absent if its sequence was admitted and released in one plan
                self._slots[slot].is_inert = True
        for source, target in plan.moves:
            if target in self._slots and not self._slots[target].is_inert:
                raise AssertionError(f"a slot is moved to slot {target}, which is live")
            self._slots[target] = self._slots.pop(source)
        for new in plan.admissions:
            if new.slot in self._slots and not self._slots[new.slot].is_inert:
                raise AssertionError(f"a sequence is admitted into slot {new.slot}, which is live")
            self._slots[new.slot] = _Slot(
                new.tokens.tolist(),
                new.request,
                new.sample_index,
                new.request.end_length(new.max_length, new.sample_index),
            )
        for new in plan.extensions:
            self._slots[new.slot].tokens[new.start :] = new.tokens
        for slot, index, page in plan.page_updates:
            self._slots[slot].page_table[index] = page
        for slot, page, entry, is_on_host in plan.restores:
            kept = self._host_snapshots if is_on_host else self._snapshots
            target = self._slots[slot]
            target.num_in_state, target.state = map(int, kept[entry, :2])
            self._cells[page] = kept[entry, 2:]
        self._check_window(plan)

    def _check_window(self, plan: StepPlan) -> None:
        window = range(plan.window_start, plan.window_start + plan.window_size)
        if plan.is_decode_loop and any(row.slot not in window for row in plan.rows):
            raise AssertionError("a decoding slot is outside the window")

    def _iterate(self, plan: StepPlan, result: StepResult) -> tuple[int, list[int]]:
        """Run the plan's rows and return how many positions they attend to.

        The first number counts all rows with several tokens, except an encoder's; the list counts
        the other rows for each iteration.
        """
        prefilled, decoded = 0, []
        # Number of tokens that each row still delivers; a row that delivers none is computed too.
        left = [self._num_accepted(row, plan) for row in plan.rows]
        for iteration in range(plan.num_iterations):
            if plan.is_decode_loop and all(self._slots[row.slot].is_inert for row in plan.rows):
                break
            decoded.append(0)
            for index, row in enumerate(plan.rows):
                slot = self._slots[row.slot]
                start = self._start(slot, row, plan)
                if start is None or (iteration and not left[index]):
                    continue
                attended = row.num_tokens * start + row.num_tokens * (row.num_tokens + 1) // 2
                if row.encodes:
                    pass  # an encoder's tokens attend to all tokens
                elif row.num_tokens == 1:
                    decoded[-1] += attended
                else:
                    prefilled += attended
                if row.encodes:
                    self._encode(slot, row)
                elif self._reads_context:
                    self._write(slot, start, row.num_tokens)
                if row.num_pooled and result.pooled is not None:
                    result.pooled[index] = self._pool(slot, start + row.num_tokens, row.num_pooled)
                if left[index]:
                    left[index] -= 1
                    self._sample(slot, index, result)
                if result.proposals is not None:
                    left[index] -= self._go_on(
                        slot, index, min(left[index], plan.num_proposed), result
                    )
        return prefilled, decoded

    def _no_proposals(self, plan: StepPlan) -> np.ndarray | None:
        if not plan.num_proposed:
            return None
        return np.zeros((len(plan.rows), len(ProposalCount) + plan.num_proposed), np.int32)

    def _go_on(self, slot: _Slot, index: int, most: int, result: StepResult) -> int:
        """Deliver the accepted proposals after a row's newest token; return their number."""
        num = 0
        while num < most and not slot.is_inert:
            if self._reads_context:
                self._write(slot, len(slot.tokens) - 1, 1)
            self._sample(slot, index, result)
            num += 1
        assert result.proposals is not None
        counts = result.proposals[index]
        counts[: len(ProposalCount)] += (int(num > 0), num, 1, 1)
        counts[len(ProposalCount) :][:num] += 1
        return num

    def _start(self, slot: _Slot, row: Row, plan: StepPlan) -> int | None:
        """Return the position at which a row begins; None if its slot is inert.

        A row that samples ends at the newest token.
        """
        if slot.is_inert:
            return None
        if not row.samples:
            return row.start if row.start + row.num_tokens <= len(slot.tokens) else None
        start = len(slot.tokens) - row.num_tokens
        is_late = start > row.start and not plan.is_decode_loop
        if is_late or (start < row.start and self._accepted is None):
            raise AssertionError("a sampling row must end at the newest token")
        return start

    def _num_accepted(self, row: Row, plan: StepPlan) -> int:
        """Return the number of tokens that a row delivers unless its answer ends.

        States go on with every iteration, so that only proposals are refused.
        """
        least = 0
        if self.config.has_slot_state:
            least = plan.num_iterations if plan.num_proposed else row.max_new_tokens
        if self._accepted is None or not row.samples:
            return row.max_new_tokens
        slot = self._slots[row.slot]
        num = self._accepted(slot.request, slot.sample_index, len(slot.tokens))
        return min(row.max_new_tokens, max(least, num))

    def _sample(self, slot: _Slot, index: int, result: StepResult) -> None:
        if self._has_fault(slot):
            result.finite[index], slot.is_inert = False, True
            return
        context = self._read_all(slot) if self._reads_context else 0
        result.tokens[index, result.num_tokens[index]] = self._append(slot, context)
        result.num_tokens[index] += 1

    @property
    def _is_predictable(self) -> bool:
        """Whether every answer runs to its length limit and its tokens do not depend on context."""
        models = (self._answer_length, self._fault_length, self._accepted)
        is_steady = all(model is None for model in models) and not self.config.num_proposed
        return is_steady and not self._reads_context

    def _decode_at_once(self, plan: StepPlan, result: StepResult) -> list[int]:
        """Run a predictable decode loop; return the same as `_iterate` for rows of one token."""
        lengths = np.zeros(len(plan.rows), np.int64)
        for index, row in enumerate(plan.rows):
            slot = self._slots[row.slot]
            if slot.is_inert:
                continue
            lengths[index] = len(slot.tokens)
            token = self._append(slot, 0)
            count = 1
            if not slot.is_inert:
                count = min(plan.num_iterations, slot.max_length - len(slot.tokens) + 1)
                slot.tokens += [token] * (count - 1)
                slot.is_inert = len(slot.tokens) >= slot.max_length
            result.tokens[index, :count] = token
            result.num_tokens[index] = count
        later = np.arange(result.num_tokens.max(initial=0))
        return ((lengths[:, None] + later) * (result.num_tokens[:, None] > later)).sum(0).tolist()

    def _write(self, slot: _Slot, start: int, count: int) -> None:
        if self.config.has_slot_state:
            if start not in (0, slot.num_in_state):
                raise AssertionError("a row must begin where the state of its slot ends")
            if start and slot.state != self._read(slot, start - 1):
                raise AssertionError(f"the state of a slot is not that of its {start} tokens")
            slot.num_in_state = start + count
        layout = self.config.page_layout
        if layout.is_grouped and start:
            self._check_windows(slot, start)
        context = self._read(slot, start - 1) if start else 1
        for position in range(start, start + count):
            context = mix(context, slot.tokens[position])
            for table in range(layout.num_tables):
                # What a table has differs from what the others have.
                own = mix(context, table) if table else context
                self._cells[self._cell(slot, position, table)] = own
        slot.state = context

    def _check_windows(self, slot: _Slot, start: int) -> None:
        """Raise AssertionError unless a query at `start` sees its context in every table."""
        layout = self.config.page_layout
        whole = layout.groups[0].window or start  # which table 0 has
        for group in layout.groups:
            first = max(0, start - min(whole, group.window or start) + 1)
            for table in layout.tables(group) if group.window is not None else ():
                wanted = self._context(slot, 0, first, start)
                if table:
                    wanted = _mix_all(wanted, table)
                if not np.array_equal(self._context(slot, table, first, start), wanted):
                    raise AssertionError(f"position {start} does not see its window")

    def _context(self, slot: _Slot, table: int, start: int, stop: int) -> np.ndarray:
        """Return the values of a table at positions `start` to `stop`."""
        size, num_tables = self.config.page_size, self.config.page_layout.num_tables
        indices = range(start // size, -(-stop // size))
        pages = [slot.page_table.get(i * num_tables + table, NULL_PAGE) for i in indices]
        if NULL_PAGE in pages:
            raise AssertionError(f"positions {start} to {stop} are outside the page table")
        begin = start - indices.start * size
        return self._cells[pages].ravel()[begin : begin + stop - start]

    def _encode(self, slot: _Slot, row: Row) -> None:
        """Write hashes of the whole prompt at each of its positions, padding included."""
        request = slot.request
        if (row.start, row.num_tokens) != (0, len(request.encoder_prompt)):
            raise AssertionError("an encoder's prompt is cut")
        whole = 1
        for token in slot.tokens[: row.num_tokens]:
            whole = mix(whole, token)
        for position in range(request.num_encoded if self._reads_context else 0):
            page, offset = self._cell(slot, position)
            self._cells[page, offset] = mix(whole, position)

    def _read_all(self, slot: _Slot) -> int:
        num_tokens, layout = len(slot.tokens), self.config.page_layout
        if layout.is_grouped:
            self._check_windows(slot, num_tokens)
            read = 0
            for group in layout.groups:
                first = max(0, num_tokens - (group.window or num_tokens))
                for table in layout.tables(group):
                    seen = self._context(slot, table, first, num_tokens)
                    read ^= int(np.bitwise_xor.reduce(seen))
            return read
        num_pages = -(-num_tokens // self.config.page_size)
        pages = [slot.page_table[index] for index in range(num_pages)]
        return int(np.bitwise_xor.reduce(self._cells[pages].ravel()[:num_tokens]))

    def _pool(self, slot: _Slot, end: int, num_tokens: int) -> np.ndarray:
        """Return a number of the contexts of `num_tokens` tokens up to `end`, exact in a sum."""
        read = range(end - num_tokens, end if self._reads_context else 0)
        return np.array([sum(self._read(slot, position) % 997 for position in read)], np.float32)

    def _read(self, slot: _Slot, position: int, table: int = 0) -> int:
        return int(self._cells[self._cell(slot, position, table)])

    def _cell(self, slot: _Slot, position: int, table: int = 0) -> tuple[int, int]:
        number = position // self.config.page_size * self.config.page_layout.num_tables + table
        page = slot.page_table.get(number, NULL_PAGE)
        if page == NULL_PAGE:
            raise AssertionError(f"position {position} is outside the page table")
        return page, position % self.config.page_size

    def _has_fault(self, slot: _Slot) -> bool:
        if self._fault_length is None:
            return False
        return slot.num_outputs >= self._fault_length(slot.request, slot.sample_index)

    def _append(self, slot: _Slot, context: int) -> int:
        request = slot.request
        num_outputs = slot.num_outputs + 1
        stream = 0 if request.params.is_greedy else mix(request.seed, slot.sample_index)
        token = 1 + mix(context, stream) % (self._vocab_size - 1)
        if self._answer_length is not None:
            if num_outputs >= self._answer_length(request, slot.sample_index):
                token = END_TOKEN
        slot.tokens.append(token)
        slot.is_inert = token in request.stop_token_ids or len(slot.tokens) >= slot.max_length
        return token
