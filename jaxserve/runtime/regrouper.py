"""Moves of devices between the two groups of a runtime (ExeGPT, section 5.2)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from typing import Any, final

import jax

from jaxserve.core.assets import cache_folder
from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    EngineFailedError,
    InvalidConfigError,
    RegroupError,
    RuntimeClosedError,
)
from jaxserve.core.sizes import parse_bytes
from jaxserve.execution.grouped import GroupedExecutor
from jaxserve.execution.memory_plan import StepBytes
from jaxserve.execution.regroup import (
    GroupMaker,
    Leaves,
    WeightsMemory,
    exchange,
    meshes_of,
    shared_leaves,
)
from jaxserve.memory.page_pool import MIN_PAGES
from jaxserve.planning.schedules.divided import DivisionOption, DivisionRule
from jaxserve.planning.schedules.schedule import AllocationPolicy, Division
from jaxserve.planning.step_times import GroupSizes, GroupTimes, StepTimes, find_times
from jaxserve.runtime.replicas import Replicas
from jaxserve.runtime.timings import Timings
from jaxserve.sharding import DeviceGroups
from jaxserve.steps.step_function import abstract

_log = logging.getLogger(__name__)

# Seconds of a pause without the placing of weights, until a move has measured them.
_REST_S = 0.05


@final
@dataclass(frozen=True)
class _Room:
    """The memory of a device of two groups.

    `num_bytes` are for weights, pages and the largest step, on the fullest present device. `shared`
    are arrays of the weights that are not freed when the runtime drops its references.
    """

    num_bytes: int
    shared: Leaves


@final
@dataclass(frozen=True)
class _Fit:
    """The pool of a division, and the reason for which weights cannot be placed; "" if they can."""

    num_pages: int
    refused: str = ""


@final
class Regrouper:
    """Moves devices between the two groups of a runtime, while requests continue.

    Executors and executables for the new groups are made while the engine serves. Then its loop is
    paused: KV is dropped, weights are placed, and caches are made. Running sequences keep their
    tokens, and their KV is recomputed. If anything fails, the weights are put back, and the groups
    serve as before. If that fails too, the engine fails.

    One thread at a time may call `move`; any thread may call `options`. The lock `placing` is held
    while weights are placed, so that no devices move between groups. `executor` has no wrappers.

    Attributes:
      num_moves: number of moves so far, which identifies the present groups.
      pause_s: seconds for which they have paused the engine.
    """

    def __init__(
        self,
        replicas: Replicas,
        executor: GroupedExecutor,
        maker: GroupMaker,
        groups: DeviceGroups,
        timings: Timings,
        clock: Clock,
    ):
        self.num_moves = 0
        self.pause_s = 0.0
        self._replicas = replicas
        self._executor = executor
        self._maker = maker
        self._placing = replicas.placing
        self._timings = timings
        self._clock = clock
        self._devices: list[Any] = [device for group in groups.devices for device in group]
        self._groups = groups
        divisions = maker.divisions(executor.params[0], self._devices)
        self._others = {Division(*sizes): groups for sizes, groups in divisions.items()}
        self._sizes: GroupSizes | None = None
        # Seconds that placing weights is expected to take, and that the rest of a pause took last.
        self._placing_s: dict[Division, float] = {}
        self._rest_s = _REST_S
        # Memory by division and the arrays that the caller shares; empty after a move.
        self._memories: dict[tuple[Division, Leaves], WeightsMemory] = {}
        # Divisions whose executors could not be made, and why.
        self._failed: dict[Division, str] = {}
        self._is_closed = False

    @property
    def present(self) -> Division:
        return _division(self._groups)

    def learn(self, times: GroupTimes) -> None:
        """Set the step times of the present groups, and retry divisions that have failed.

        Times of groups of other sizes come from the cache folder, if it has them.
        """
        with self._placing:
            self._failed.clear()
            if self._sizes is not None:
                self._sizes.learn(times)
                return
            self._sizes = GroupSizes(times)
            for size in {size for each in self._others for size in astuple(each)}:
                if not self._sizes.is_measured(size):
                    origin = self._timings.group_origin(size)
                    found = find_times(StepTimes, cache_folder() / "profiles", origin)
                    if found is not None:
                        self._sizes.add(found)

    def rule(self, policy: AllocationPolicy) -> DivisionRule:
        """Return the rule by which WAA-C or WAA-M divides the devices for this model."""
        with self._placing:
            mesh = meshes_of(self._groups)[0]
            # Beyond one shard for each KV head, shards have copies.
            num_shards = min(mesh.size, self._maker.spec.model_config.num_kv_heads)
            page_bytes = self._maker.page_bytes(mesh) * num_shards
            leaves = jax.tree.leaves(self._executor.params[0])
            return DivisionRule(
                policy=policy,
                weights_bytes=sum(leaf.nbytes for leaf in leaves),
                token_bytes=page_bytes / self._executor.config.page_size,
            )

    def options(self) -> Sequence[DivisionOption]:
        """Return the divisions that the devices allow, the present one first. Call `learn` before.

        Divisions that hold only shorter answers than the present one are left out.
        """
        with self._placing:
            self._replicas.first.loop.check()
            return self._options()

    def _options(self) -> Sequence[DivisionOption]:
        assert self._sizes is not None
        sizes, present, room = self._sizes, self.present, self._room()
        config = self._executor.config
        found = [
            DivisionOption(
                division=present,
                times=sizes.times(present.encode, present.decode),
                num_pages=config.num_pages,
            )
        ]
        for division in self._others:
            if division == present:
                continue
            fit = self._fit(division, room)
            if fit is None:
                continue
            found.append(
                DivisionOption(
                    division=division,
                    times=sizes.times(division.encode, division.decode),
                    num_pages=fit.num_pages,
                    pause_s=self._expected_pause_s(division),
                    is_measured=sizes.is_measured(division.encode, division.decode),
                    refused=fit.refused or self._failed.get(division, ""),
                )
            )
        return found

    def _expected_pause_s(self, division: Division) -> float:
        """Return the expected pause of a move; times a trial array, once until the next move."""
        if division not in self._placing_s:
            params, groups = self._executor.params[0], self._others[division]
            self._placing_s[division] = self._maker.placing_s(params, groups)
        return self._rest_s + self._placing_s[division]

    def move(self, division: Division, max_pause_s: float) -> float:
        """Move devices between the groups; return the seconds for which the engine was paused.

        No step is in flight in these seconds. The placing of weights ends when they take longer
        than `max_pause_s`.

        Raises:
          InvalidConfigError: the devices, or the model, do not allow this division.
          RegroupError: the memory does not suffice, the pause is expected to be longer, or was, or
            something failed; the groups serve as before.
          EngineFailedError: something failed, and the weights could not be put back; or the engine
            had failed before.
        """
        self._replicas.first.loop.check()
        if division == self.present:
            return 0.0
        room = self._room()
        fit = self._fit(division, room) if division in self._others else None
        if fit is None:
            possible = (d for d in self._others if d == self.present or self._fit(d, room))
            raise InvalidConfigError(
                f"encode={division.encode}, decode={division.decode} is not a division of these "
                f"{len(self._devices)} devices that the model and the memory of the present "
                f"groups allow; pass one of {', '.join(map(str, possible))} (prompts/answers)"
            )
        if fit.refused:
            raise RegroupError(
                f"devices cannot move from {self.present} to {division}: {fit.refused}"
            )
        expected_s = self._expected_pause_s(division)
        if expected_s > max_pause_s:
            raise RegroupError(
                f"moving devices from {self.present} to {division} is expected to pause the engine "
                f"for {expected_s:.3g} s, and max_pause_s={max_pause_s:.3g}; pass a longer one"
            )
        try:
            pause_s = self._carried_out(division, fit, max_pause_s)
        except RuntimeClosedError:
            raise
        except Exception as error:
            if self._replicas.first.loop.has_failed:
                raise
            self._failed[division] = f"an earlier move failed: {type(error).__name__}: {error}"
            raise RegroupError(
                f"moving devices from {self.present} to {division} failed, and the groups serve as "
                f"before: {type(error).__name__}: {error}"
            ) from error
        self.pause_s += pause_s
        self._rest_s = max(_REST_S, pause_s - expected_s + self._rest_s)
        _log.info("devices moved to %s in a pause of %.3g s", division, pause_s)
        return pause_s

    def close(self) -> None:
        """End a move that is being prepared; any thread may call it."""
        self._is_closed = True

    def _carried_out(self, division: Division, fit: _Fit, max_pause_s: float) -> float:
        replica, groups, maker = self._replicas.first, self._others[division], self._maker
        before, shapes = self._executor.config, abstract(self._executor.params[0])
        step_bytes = maker.step_bytes(shapes, groups, fit.num_pages)
        measured = self._fit(division, self._room(), step_bytes)
        if measured is None:
            raise RegroupError(
                f"the largest steps of these groups need {max(step_bytes):,} bytes, and with them "
                "the pool would hold shorter answers; lower max_step_tokens or max_context"
            )
        with ExitStack() as if_it_fails:
            # The executables of the largest steps are used, if the pages that were expected fit.
            num_pages = min(fit.num_pages, measured.num_pages)
            prepared = maker.prepare(groups, shapes, num_pages, self._check_open)
            if_it_fails.callback(prepared.close)
            with self._placing, self._replicas.paused("keep"):
                begin_s = self._clock.now()
                room = self._room()
                now = self._fit(division, room, step_bytes)
                if self._executor.config != before or now is None or now.num_pages < num_pages:
                    raise RegroupError("the memory for pages has changed meanwhile; try again")
                if now.refused:
                    raise RegroupError(now.refused)

                def check() -> None:
                    self._check_open()
                    passed_s = self._clock.now() - begin_s
                    if passed_s > max_pause_s:
                        raise RegroupError(
                            f"the pause has taken {passed_s:.3g} s, and max_pause_s is "
                            f"{max_pause_s:.3g}"
                        )

                page_bytes = map(maker.page_bytes, meshes_of(groups))
                largest, step = max(zip(page_bytes, step_bytes, strict=True))
                size = replace(
                    replica.pool_size,
                    num_pages=num_pages,
                    page_bytes=largest,
                    step=StepBytes.of(step),
                )
                try:
                    replica.recompute(
                        size,
                        lambda: exchange(self._executor, prepared, maker, room.shared, check),
                    )
                except EngineFailedError as error:
                    replica.loop.fail(error)
                    raise
                if_it_fails.pop_all()
                pause_s = self._clock.now() - begin_s
                self._groups = groups
                self.num_moves += 1
                self._placing_s.clear()  # weights are elsewhere now
                self._memories.clear()
                times = self._measured(division)
                self._timings.set_groups(division.encode, division.decode, times)
        return pause_s

    def _measured(self, division: Division) -> GroupTimes | None:
        sizes = astuple(division)
        if self._sizes is None or not self._sizes.is_measured(*sizes):
            return None
        return self._sizes.times(*sizes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("this runtime was closed; create a new one")

    def _room(self) -> _Room:
        shared = shared_leaves(self._executor.params)
        config, size = self._executor.config, self._replicas.first.pool_size
        weights = self._memory(self.present, shared).group_bytes
        pages = map(self._maker.page_bytes, meshes_of(self._groups))
        used = max(w + config.num_pages * p for w, p in zip(weights, pages, strict=True))
        return _Room(used + size.step.measure(), shared)

    def _memory(self, division: Division, shared: Leaves) -> WeightsMemory:
        if (division, shared) not in self._memories:
            groups = self._groups if division == self.present else self._others[division]
            found = self._maker.moved_bytes(self._executor.params, groups, shared)
            self._memories[division, shared] = found
        return self._memories[division, shared]

    def _fit(self, division: Division, room: _Room, step_bytes: Sequence[int] = ()) -> _Fit | None:
        """Return how a division fits; None if its pool holds shorter answers than the present one.

        Every device is assumed to have the memory of the fullest one of the present groups. The
        size of each group's largest step is by default the present one scaled by the size of the
        shards, which is an upper bound.
        """
        config, maker = self._executor.config, self._maker
        memory = self._memory(division, room.shared)
        present = self._replicas.first.pool_size.step.measure()
        fewest = min(len(devices) for devices in self._groups.devices)
        num_pages = 1 + config.max_slots * config.max_pages_per_sequence
        for group, mesh in enumerate(meshes_of(self._others[division])):
            step = max(present, present * fewest // mesh.size)
            if step_bytes:
                step = step_bytes[group]
            left = room.num_bytes - memory.group_bytes[group] - step
            if (wanted := maker.spec.options.kv_memory) is not None:
                left = min(left, parse_bytes(wanted))
            num_pages = min(num_pages, left // maker.page_bytes(mesh))
        if num_pages < MIN_PAGES:
            return None
        if replace(config, num_pages=num_pages).max_length < config.max_length:
            return None
        if memory.most_bytes <= room.num_bytes:
            return _Fit(num_pages)
        return _Fit(
            num_pages,
            f"a device would need {memory.most_bytes:,} bytes while weights are placed array by "
            f"array, and the present ones have {room.num_bytes:,} for weights, pages and steps; "
            "pass more kv_memory"
            + (", or delete the model that was given to the runtime" if room.shared else ""),
        )


def _division(groups: DeviceGroups) -> Division:
    encode, decode = map(len, groups.devices)
    return Division(encode, decode)
