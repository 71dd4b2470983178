"""The slots on the device: edits that a plan asks for before its rows run, and moves of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.execution.pages import (
    DevicePages,
    HostEntries,
    OwnShards,
    abstract_pages,
    chunks,
    transit_bytes,
)
from jaxserve.memory.snapshots import HostStateCopy, StateCopy
from jaxserve.models.batch import KVCache
from jaxserve.scheduling.plan import Extension, Row, StepPlan
from jaxserve.steps import slots as edits
from jaxserve.steps.sampling.sampler import SamplingNeeds
from jaxserve.steps.slots import (
    EXTENSIONS_A_CALL,
    MOVES_A_CALL,
    PAGE_UPDATES_A_CALL,
    SlotState,
    copy_entry,
    entry_of,
    move_states,
    pack_moves,
)
from jaxserve.steps.step_function import Shelf, abstract, unkept


@final
class DeviceSlots:
    """A copy of the slot state; `state` is donated to every step and replaced by its result.

    The host holds, for each slot, which features of the sampler its request needs. `looks_up`
    allows lookups of proposals in these slots, if the runtime speculates.
    """

    def __init__(
        self,
        config: EngineConfig,
        place: jax.sharding.Sharding,
        shelf: Shelf | None = None,
        *,
        looks_up: bool = True,
    ):
        step = partial((shelf or unkept(place)).function, out_shardings=place)
        # A jitted function creates the state, since `device_put` onto a mesh over several processes
        # would compare the host's values across processes.
        empty = partial(edits.empty_slots, config, looks_up=looks_up)
        self._new = step("empty_slots", empty, config, looks_up)
        self.state: SlotState = self._new()
        self._needs = [SamplingNeeds()] * config.max_slots
        self._config = config
        self._looks_up = looks_up and config.num_proposed > 0
        self._place = place
        edit = partial(step, packs=True, donate_argnums=0)
        self._edit_slots = edit("edit", edits.edit)
        self._move_slots = edit("move", edits.move)
        self._admit_slots = edit("admit", edits.admit)
        self._extend_slots = edit("extend", edits.extend)
        self._remember = edit("remember", edits.remember)
        self._forget_answers = edit("forget_answers", edits.forget_answers)

    def apply(self, plan: StepPlan) -> None:
        """Carry out releases, moves, admissions, extensions and page updates.

        In a runtime that speculates, answers of released slots are kept for proposals.
        """
        for source, target in plan.moves:
            self._needs[target] = self._needs[source]
        for new in plan.admissions:
            self._needs[new.slot] = SamplingNeeds.of(new.request.params)
        releases = plan.releases
        if self._looks_up:
            for slot in releases:
                self.state = self._remember(self.state, np.asarray(slot, np.int32))
            if plan.forgets_answers:
                self.state = self._forget_answers(self.state)
        if plan.moves or plan.admissions:  # page updates refer to the slots after these
            if releases:
                self._edit(releases, ())
                releases = ()
            for some in chunks(plan.moves, MOVES_A_CALL):
                self.state = self._move_slots(self.state, *edits.pack_moves(self._config, some))
            for some in edits.admissions_by_call(self._config, plan.admissions):
                self.state = self._admit_slots(
                    self.state, *edits.pack_admissions(self._config, some)
                )
        extensions = [*plan.extensions, *(_proposed(row) for row in plan.rows if row.proposed)]
        for pieces in chunks(edits.pieces(extensions), EXTENSIONS_A_CALL):
            packed = edits.pack_extensions(self._config, pieces)
            self.state = self._extend_slots(self.state, packed)
        for updates in chunks(plan.page_updates, PAGE_UPDATES_A_CALL):
            self._edit(releases, updates)
            releases = ()
        if releases:
            self._edit(releases, ())

    def needs(self, rows: Iterable[Row]) -> SamplingNeeds:
        """Return the sampler features that the sampling rows need, after their plan's edits."""
        return SamplingNeeds.union(self._needs[row.slot] for row in rows if row.samples)

    def warm_up(self, *, takes_masks: bool) -> None:
        """Compile every edit without changing a slot."""
        grammars = self.preparations_for_grammars() if takes_masks else []
        for _, prepare in (*self.preparations(), *grammars):
            prepare()

    def preparations_for_grammars(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return `preparations` of edits that only requests with a grammar need."""
        packed = edits.pack_extensions(self._config, ())
        prepare = partial(self._extend_slots.prepare, abstract(self.state), packed)
        return [("forced tokens", prepare)]

    def preparations(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return (name, function) of every edit; a function compiles the edit, on any thread."""
        state = abstract(self.state)
        moves = edits.pack_moves(self._config, ())
        nothing = edits.pack_edits(self._config, (), ())
        prepare = {
            "edits of slots": partial(self._edit_slots.prepare, state, nothing),
            "moves of slots": partial(self._move_slots.prepare, state, *moves),
        }
        if self._looks_up:
            slot = np.asarray(0, np.int32)
            prepare["ended answers"] = partial(self._remember.prepare, state, slot)
            prepare["forgotten answers"] = partial(self._forget_answers.prepare, state)
        for size in self._config.admission_buckets:
            admissions = edits.pack_admissions(self._config, (), size)
            name = f"admissions, {size} tokens"
            prepare[name] = partial(self._admit_slots.prepare, state, *admissions)
        return list(prepare.items())

    def relocate(self, targets: np.ndarray) -> None:
        """Rewrite page tables after page i was moved to `targets[i]`, int32 [old pages]."""
        tables = jax.device_put(targets[np.asarray(self.state.page_table)], self._place)
        self.state = replace(self.state, page_table=tables)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Replace the slots by inert ones within the block."""
        own, self.state = self.state, self._new()
        try:
            yield
        finally:
            self.delete()
            self.state = own

    def renew(self) -> None:
        self.delete()
        self.state = self._new()

    def delete(self) -> None:
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def _edit(self, releases: Sequence[int], updates: Sequence[tuple[int, int, int]]) -> None:
        packed = edits.pack_edits(self._config, releases, updates)
        self.state = self._edit_slots(self.state, packed)


def _proposed(row: Row) -> Extension:
    return Extension(row.slot, row.start + row.num_tokens - len(row.proposed), row.proposed)


@final
class DeviceStates:
    """Copies the states of recurrent layers between slots, snapshots and the `host`.

    Without such layers it does nothing. It owns the snapshots: a cache whose slots and pages are
    their entries; None without any. On the host there are `num_host_snapshots` more. At most
    `transit_bytes` of states are in transit in one direction, but at least one.
    """

    def __init__(
        self,
        config: EngineConfig,
        places: KVCache,  # the shardings of the cache
        shelf: Shelf,
        snapshots: KVCache | None = None,
        num_host_snapshots: int = 0,
    ):
        self._config = config
        self.snapshots = snapshots
        leaves = jax.tree.leaves(snapshots)
        self._own = [OwnShards(leaf.sharding) for leaf in leaves]
        sizes = [own.nbytes(leaf) for own, leaf in zip(self._own, leaves, strict=True)]
        self._most = transit_bytes(sum(sizes))
        self.host = HostEntries(
            leaves,
            self._own,
            num_host_snapshots,
            entries_a_call=1,
            max_leaving_bytes=self._most,
        )
        self._has_host = num_host_snapshots > 0
        self._take = shelf.function("state_of_entry", entry_of, out_shardings=places)
        copy = partial(shelf.function, donate_argnums=0, out_shardings=places)
        self._save = copy("save_state", copy_entry)
        self._restore = copy("restore_state", copy_entry)
        self._move = shelf.function(
            "move_states",
            partial(move_states, places=cast(Any, places.states)),
            donate_argnums=0,
            out_shardings=places.states,
        )

    def allocate_host(self) -> None:
        """Allocate the memory of the snapshots on the host now, once."""
        if self._has_host:
            self.host.allocate()

    def save(self, pages: DevicePages, copies: Iterable[StateCopy | HostStateCopy]) -> None:
        """Copy states, each with a page, to snapshots, and these to the host or from it."""
        num_coming = 0
        for copy in copies:
            if isinstance(copy, StateCopy):
                source, place = pages.cache, _entries(copy.slot, copy.page)
            elif copy.goes_out:
                self.host.wait_for_room()
                leaving = self._take(self.snapshots, np.asarray(copy.entry, np.int32))
                self.host.send(jax.tree.leaves(leaving), (copy.host_entry,))
                continue
            else:
                num_coming = self._await_some(self.snapshots, num_coming)
                source, place = self._from_host(copy.host_entry), _entries(0, 0)
            entries = _entries(copy.entry, copy.entry)
            self.snapshots = self._save(self.snapshots, source, entries, place)

    def restore(self, pages: DevicePages, copies: Iterable[StateCopy]) -> None:
        """Copy snapshots to slots and pages."""
        num_coming = 0
        for slot, page, entry, is_on_host in copies:
            source, place = self.snapshots, _entries(entry, entry)
            if is_on_host:
                num_coming = self._await_some(pages.cache, num_coming)
                source, place = self._from_host(entry), _entries(0, 0)
            pages.replace(self._restore(pages.cache, source, _entries(slot, page), place))

    def _from_host(self, host_entry: int) -> Any:
        """Return a cache with one entry, an argument of jitted functions."""
        found = self.host.read((host_entry,), 1)
        leaves, structure = jax.tree.flatten(self.snapshots)
        coming = [
            own.to_devices([value], like=[leaf])[0]
            for own, value, leaf in zip(self._own, found, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, coming)

    def _await_some(self, target: KVCache | None, num_coming: int) -> int:
        """Wait for states that come to `target` if too many do; return their number with one more.

        They take device memory twice.
        """
        leaves = jax.tree.leaves(self.snapshots)
        if num_coming * sum(leaf.nbytes // leaf.shape[1] for leaf in leaves) < self._most:
            return num_coming + 1
        jax.block_until_ready(target)
        return 1

    def renew(self) -> None:
        """Replace the snapshots by zeros, after a step that may have donated them."""
        like = abstract(self.snapshots)
        self.host.drop_leaving()
        self._drop()
        self.snapshots = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), like
        )

    def delete(self) -> None:
        self.host.delete()
        self._drop()

    def _drop(self) -> None:
        for leaf in jax.tree.leaves(self.snapshots):
            leaf.delete()
        self.snapshots = None

    def move(self, pages: DevicePages, moves: Sequence[tuple[int, int]]) -> None:
        """Carry out moves (from slot, to slot). No target may also be a source."""
        if not pages.cache.states:
            return
        for some in chunks(moves, MOVES_A_CALL):
            states = self._move(pages.cache.states, *pack_moves(self._config, some))
            pages.replace(replace(pages.cache, states=states))

    def preparations(self, pages: DevicePages) -> list[tuple[str, Callable[[], Any]]]:
        states = abstract(pages.cache.states)
        if not states:
            return []
        moves = pack_moves(self._config, ())
        prepare = {"moves of states": partial(self._move.prepare, states, *moves)}
        if self.snapshots is not None:
            cache, snapshots = abstract((pages.cache, self.snapshots))
            places = _entries(0, 0), _entries(0, 0)
            prepare["states to snapshots"] = partial(self._save.prepare, snapshots, cache, *places)
            prepare["states from snapshots"] = partial(
                self._restore.prepare, cache, snapshots, *places
            )
            if self._has_host:
                shapes = jax.tree.leaves(abstract_pages(snapshots, 1))
                parts = [own.abstract(x) for own, x in zip(self._own, shapes, strict=True)]
                one = jax.tree.unflatten(jax.tree.structure(snapshots), parts)
                prepare |= {
                    "states to the host": partial(
                        self._take.prepare, snapshots, np.asarray(0, np.int32)
                    ),
                    "states from the host": partial(self._save.prepare, snapshots, one, *places),
                    "states from the host to slots": partial(
                        self._restore.prepare, cache, one, *places
                    ),
                }
        return list(prepare.items())


def _entries(state: int, page: int) -> np.ndarray:
    return np.array([state, page], np.int32)
