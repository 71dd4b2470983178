"""Moves of devices between the two groups of a runtime (ExeGPT, section 5.2)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from typing import Any, final

from jaxserve.core.assets import cache_folder
from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidConfigError, RegroupError, RuntimeClosedError
from jaxserve.core.sizes import parse_bytes
from jaxserve.execution.grouped import GroupedExecutor
from jaxserve.execution.regroup import GroupMaker, PreparedGroups, exchange, meshes_of, params_of
from jaxserve.memory.page_pool import MIN_PAGES
from jaxserve.models.config import check_fits
from jaxserve.planning import GroupTimes, find_step_times
from jaxserve.planning.group_sizes import GroupSizes
from jaxserve.planning.schedules.configuration import Division
from jaxserve.planning.schedules.divided import DivisionOption
from jaxserve.runtime.maintenance import Maintenance
from jaxserve.runtime.replicas import Replicas
from sharding import DeviceGroups, make_groups

_log = logging.getLogger(__name__)

# Seconds of a pause besides the placing of weights, before a move has shown them.
_REST_S = 0.05


@final
class Regrouper:
    """Divides the devices of a runtime with two groups in other ways, while requests go on.

    Executors for the other groups, and their executables, are made beside the engine. Then its loop
    is paused: KV is dropped, weights are placed, and caches are made. Running sequences keep their
    tokens, and their KV is computed anew. If anything fails, the groups serve as before.

    One thread at a time may call `move`.

    Args:
      executor: the executor of both groups, without wrappers.
      groups: the present groups, in one piece each.

    Attributes:
      num_moves: moves so far.
      pause_s: seconds for which they have paused the engine.
    """

    def __init__(
        self,
        replicas: Replicas,
        executor: GroupedExecutor,
        maker: GroupMaker,
        groups: DeviceGroups,
        maintenance: Maintenance,
        clock: Clock,
    ):
        self.num_moves = 0
        self.pause_s = 0.0
        self._replicas = replicas
        self._executor = executor
        self._maker = maker
        self._maintenance = maintenance
        self._clock = clock
        self._devices: list[Any] = [device for group in groups.devices for device in group]
        self._groups = groups
        self._others = self._divided()
        self._sizes: GroupSizes | None = None
        # Seconds that placing weights is expected to take, and that the rest of a pause took last.
        self._placing_s: dict[Division, float] = {}
        self._rest_s = _REST_S
        # Divisions whose executors could not be made, and why.
        self._failed: dict[Division, str] = {}
        self._is_closed = False

    @property
    def present(self) -> Division:
        """The division that the engine has."""
        return _division(self._groups)

    def learn(self, times: GroupTimes) -> None:
        """Take in step times of the present groups; let divisions be tried again that have failed.

        Times of groups of other sizes are taken from the cache folder, if it has them.
        """
        self._failed.clear()
        if self._sizes is not None:
            self._sizes.learn(times)
            return
        self._sizes = GroupSizes(times)
        sizes = {size for each in self._others for size in (each.encode, each.decode)}
        for size in sizes:
            if not self._sizes.is_measured(size):
                origin = self._maintenance.group_origin(size)
                found = find_step_times(cache_folder() / "profiles", origin)
                if found is not None:
                    self._sizes.add(found)

    def options(self) -> Sequence[DivisionOption]:
        """Return the divisions that the devices allow, the present one first. Call `learn` before.

        Those that do not hold as long an answer as the present one are left out.
        """
        assert self._sizes is not None
        sizes, present = self._sizes, self.present
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
            num_pages = self._num_pages(division)
            if num_pages is None:
                continue
            found.append(
                DivisionOption(
                    division=division,
                    times=sizes.times(division.encode, division.decode),
                    num_pages=num_pages,
                    pause_s=self.expected_pause_s(division),
                    is_measured=sizes.is_measured(division.encode, division.decode),
                    refused=self._failed.get(division, ""),
                )
            )
        return found

    def expected_pause_s(self, division: Division) -> float:
        """Return the seconds for which a move is expected to pause the engine.

        An array is placed on the devices for a trial, once until the next move.
        """
        if division not in self._placing_s:
            params = params_of(self._executor)
            self._placing_s[division] = self._maker.placing_s(params, self._others[division])
        return self._rest_s + self._placing_s[division]

    def move(self, division: Division, max_pause_s: float) -> float:
        """Move devices between the groups; return the seconds for which the engine was paused.

        No step is in flight in these seconds. The placing of weights ends when they take longer
        than `max_pause_s`.

        Raises:
          InvalidConfigError: the devices, or the model, do not allow this division.
          RegroupError: the pause is expected to be longer, or was, or something failed; the groups
            serve as before.
          RuntimeClosedError, EngineFailedError
        """
        if division == self.present:
            return 0.0
        if division not in self._others or (num_pages := self._num_pages(division)) is None:
            possible = (d for d in self._others if d == self.present or self._num_pages(d))
            raise InvalidConfigError(
                f"encode={division.encode}, decode={division.decode} is not a division of these "
                f"{len(self._devices)} devices that the model and the memory of the present "
                f"groups allow; pass one of {', '.join(map(str, possible))} (prompts/answers)"
            )
        expected_s = self.expected_pause_s(division)
        if expected_s > max_pause_s:
            raise RegroupError(
                f"moving devices from {self.present} to {division} is expected to pause the engine "
                f"for {expected_s:.3g} s, and max_pause_s={max_pause_s:.3g}; pass a longer one"
            )
        try:
            pause_s = self._carried_out(division, num_pages, max_pause_s)
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
        self.num_moves += 1
        self.pause_s += pause_s
        self._placing_s.clear()  # weights lie elsewhere now
        self._rest_s = max(_REST_S, pause_s - expected_s + self._rest_s)
        _log.info("devices moved to %s in a pause of %.3g s", division, pause_s)
        return pause_s

    def close(self) -> None:
        """End a move that is being prepared; any thread may call it."""
        self._is_closed = True

    def _carried_out(self, division: Division, num_pages: int, max_pause_s: float) -> float:
        replica, groups = self._replicas.first, self._others[division]
        params = params_of(self._executor)
        size = replace(
            replica.pool_size,
            num_pages=num_pages,
            page_bytes=max(map(self._maker.page_bytes, meshes_of(groups))),
        )
        before = self._executor.config
        with ExitStack() as if_it_fails:
            prepared: PreparedGroups = self._maker.prepare(
                groups, params, num_pages, self._check_open
            )
            if_it_fails.callback(prepared.close)
            with self._replicas.paused("keep"):
                if self._executor.config != before:
                    raise RegroupError("the page pool was resized meanwhile; try again")
                begin_s = self._clock.now()

                def check() -> None:
                    self._check_open()
                    passed_s = self._clock.now() - begin_s
                    if passed_s > max_pause_s:
                        raise RegroupError(
                            f"the pause has taken {passed_s:.3g} s, and max_pause_s is "
                            f"{max_pause_s:.3g}"
                        )

                replica.recompute(
                    size, lambda: exchange(self._executor, prepared, self._maker, check)
                )
                if_it_fails.pop_all()
                pause_s = self._clock.now() - begin_s
                self._groups = groups
                times = self._measured(division)
                self._maintenance.regrouped(division.encode, division.decode, times)
        return pause_s

    def _measured(self, division: Division) -> GroupTimes | None:
        """Return the times of a division, if they were measured."""
        sizes = astuple(division)
        if self._sizes is None or not self._sizes.is_measured(*sizes):
            return None
        return self._sizes.times(*sizes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("this runtime was closed; create a new one")

    def _divided(self) -> dict[Division, DeviceGroups]:
        """Return the divisions that the model allows, each with its groups."""
        found, params = {}, params_of(self._executor)
        num = len(self._devices)
        for encode in range(1, num):
            for decode in range(1, num - encode + 1):
                groups = make_groups(encode=encode, decode=decode, devices=self._devices)
                try:
                    for mesh in meshes_of(groups):
                        check_fits(mesh, self._maker.model_config)
                        self._maker.weights_bytes(params, mesh)
                except ValueError:  # the model cannot be divided so
                    continue
                found[Division(encode, decode)] = groups
        return found

    def _num_pages(self, division: Division) -> int | None:
        """Return the pages of a division's pool; None if it holds shorter answers than now.

        The fullest device of the present groups has room for its weights, pages and steps, so each
        device has as much.
        """
        config, size = self._executor.config, self._replicas.first.pool_size
        params, maker = params_of(self._executor), self._maker
        weights = [maker.weights_bytes(params, mesh) for mesh in meshes_of(self._groups)]
        pages = [maker.page_bytes(mesh) for mesh in meshes_of(self._groups)]
        room = max(w + config.num_pages * p for w, p in zip(weights, pages, strict=True))
        num_pages = 1 + config.max_slots * config.max_pages_per_sequence
        fewest = min(len(devices) for devices in self._groups.devices)
        for mesh in meshes_of(self._others[division]):
            # Temporaries of a step grow at most as the shards do.
            more = max(0, size.step_bytes * fewest // mesh.size - size.step_bytes)
            left = room - maker.weights_bytes(params, mesh) - more
            if (wanted := maker.options.kv_memory) is not None:
                left = min(left, parse_bytes(wanted))
            num_pages = min(num_pages, left // maker.page_bytes(mesh))
        if num_pages < MIN_PAGES:
            return None
        holds = replace(config, num_pages=num_pages).max_length
        return num_pages if holds >= config.max_length else None


def _division(groups: DeviceGroups) -> Division:
    encode, decode = map(len, groups.devices)
    return Division(encode, decode)
