"""The measured step times of a runtime's devices: measured once, stored, and found again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from jaxserve.core.assets import cache_folder
from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.planning.step_times import GroupTimes, Origin, StepTimes, find_times, keep_times
from jaxserve.runtime.replicas import Replicas

_log = logging.getLogger(__name__)


@final
class Timings:
    """Times the steps of a replica while all replicas are idle. `Runtime` documents each method.

    With two device groups, `origin` is the encode group's and `decode_origin` the decode group's.
    """

    def __init__(
        self,
        replicas: Replicas,
        origin: Origin,
        clock: Clock,
        options: RuntimeOptions,
        decode_origin: Origin | None = None,
    ):
        self._replicas = replicas
        self._origin = origin
        self._decode_origin = decode_origin
        self._clock = clock
        self._options = options
        self._times: StepTimes | None = None
        self._group_times: GroupTimes | None = None

    @property
    def has_groups(self) -> bool:
        return self._decode_origin is not None

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each group's step times, with the present configuration."""
        config = self._replicas.first.executor.config
        return tuple(replace(each, config=config) for each in self._stored)

    @property
    def devices(self) -> tuple[dict[str, Any], ...]:
        """A description of the devices of each group, which changes when they move."""
        return tuple(each.device for each in self._stored)

    @property
    def _stored(self) -> tuple[Origin, ...]:
        """The origins with the configuration of the start, which a resize does not change."""
        both = (self._origin, self._decode_origin)
        return tuple(each for each in both if each is not None)

    # ---- one group of devices ----

    def measure_step_times(self, rounds: int, max_wait_s: float | None = None) -> StepTimes:
        from jaxserve.planning.profiler import measure

        self._replicas.check_leads()
        self._check_one_group()
        with self._replicas.paused(until_s=self._until_s(max_wait_s)):
            self._warm_up()
            times = measure(
                self._replicas.first.executor,
                self.origins[0],
                self._clock,
                rounds=rounds,
                progress=self._options.progress,
            )
            for replica in self._replicas.all:
                replica.engine.forget_kept_pages(keeps_disk=True)
            self._value_pages_by(times.chunk_cost())
        self._times = times
        return times

    def load_step_times(self, path: str | Path) -> StepTimes:
        self._check_one_group()
        times = StepTimes.load(Path(path), expected=self._origin)
        self._use(times)
        return times

    def find_step_times(self, folder: Path) -> StepTimes | None:
        self._check_one_group()
        times = find_times(StepTimes, folder, self._origin)
        if times is not None:
            self._use(times)
        return times

    def step_times(self, max_wait_s: float | None = None, *, rounds: int = 2) -> StepTimes:
        """Return the newest step times, or those of the cache folder, or measure and store them.

        If the file cannot be written, a warning says so, and the next start measures again.
        """
        found = self._times or self.find_step_times(_folder())
        if found is None:
            _log.info("measuring step times once for this model, device and configuration")
            found = self.measure_step_times(rounds, max_wait_s)
            _keep(found)
        return found

    # ---- two groups of devices ----

    def measure_group_times(self, rounds: int, max_wait_s: float | None = None) -> GroupTimes:
        from jaxserve.planning.profiler import measure_groups

        self._replicas.check_leads()
        self._check_two_groups()
        with self._replicas.paused(until_s=self._until_s(max_wait_s)):
            self._warm_up()
            self._group_times = measure_groups(
                self._replicas.first.executor,
                self.origins,
                self._clock,
                rounds=rounds,
                progress=self._options.progress,
            )
        return self._group_times

    def load_group_times(self, path: str | Path) -> GroupTimes:
        self._check_two_groups()
        self._group_times = GroupTimes.load(path, expected=self.origins)
        return self._group_times

    def find_group_times(self, folder: Path) -> GroupTimes | None:
        self._check_two_groups()
        found = find_times(GroupTimes, folder, self.origins)
        self._group_times = found or self._group_times
        return found

    def group_times(self, max_wait_s: float | None = None, *, rounds: int = 2) -> GroupTimes:
        """Return the times of both groups, found or measured like `step_times`.

        They are not stored if several processes serve, because copies between groups depend on how
        the processes reach each other.
        """
        found = self._times_of_present_groups()
        is_kept = self._replicas.group is None
        if found is None and is_kept:
            found = self.find_group_times(_folder())
        if found is None:
            _log.info("measuring step times once for this model, these groups and configuration")
            found = self.measure_group_times(rounds, max_wait_s)
            if is_kept:
                _keep(found)
        return found

    def _times_of_present_groups(self) -> GroupTimes | None:
        """Return the times that are known; None if devices have moved since they were read."""
        times = self._group_times
        if times is None:
            return None
        counts = [each.origin.device["count"] for each in times.groups]
        return times if counts == [each["count"] for each in self.devices] else None

    def group_origin(self, num_devices: int) -> Origin:
        return self.origins[0].on(num_devices)

    def set_groups(self, encode: int, decode: int, times: GroupTimes | None) -> None:
        """Record the numbers of devices after a move; times of None are measured when needed."""
        self._origin, self._decode_origin = map(self.group_origin, (encode, decode))
        self._group_times = times

    def _use(self, times: StepTimes) -> None:
        with self._replicas.paused("keep"):
            self._value_pages_by(times.chunk_cost())
        self._times = times

    def _warm_up(self) -> None:
        """Compile what is missing, so that no compilation is timed."""
        for replica in self._replicas.all:
            replica.warm_up(self._options, waits=True)

    def _check_one_group(self) -> None:
        if self.has_groups:
            raise InvalidConfigError(
                "step times are those of one group of devices, and this runtime has two; call "
                "measure_group_times"
            )

    def _check_two_groups(self) -> None:
        if not self.has_groups:
            raise InvalidConfigError(
                "this runtime has one group of devices; call measure_step_times, or create it with "
                "mesh=sharding.make_groups(...)"
            )

    def _until_s(self, max_wait_s: float | None) -> float | None:
        return None if max_wait_s is None else self._clock.now() + max_wait_s

    def _value_pages_by(self, cost: RecomputeCost) -> None:
        for replica in self._replicas.all:
            replica.engine.value_by(cost)


def _folder() -> Path:
    return cache_folder() / "profiles"


def _keep(times: StepTimes | GroupTimes) -> None:
    try:
        _log.info("step times are kept in %s", keep_times(_folder(), times))
    except OSError as error:
        _log.warning("step times cannot be kept (%s); the next start measures again", error)
