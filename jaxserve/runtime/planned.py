"""The part of a runtime that measures its steps and plans by them."""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning import GroupTimes, StepTimes
from jaxserve.planning.schedules.estimates import LatencyBounds
from jaxserve.planning.schedules.plan import Plan
from jaxserve.runtime.intake import Intake
from jaxserve.runtime.maintenance import Maintenance
from jaxserve.runtime.planner import MAX_PAUSE_S, Planner
from jaxserve.runtime.scored import Scored


class Planned(Scored):
    """The methods of `Runtime` that measure step times, and find a schedule from them."""

    @abc.abstractmethod
    def __init__(self, maintenance: Maintenance, planner: Planner, intake: Intake):
        super().__init__(maintenance, intake)
        self._planner = planner

    def plan(
        self,
        latency_bound: float | None = None,
        *,
        first_token_bound: float | None = None,
        token_bound: float | None = None,
        lengths: Sequence[tuple[int, int]] | np.ndarray | None = None,
        adopt: bool = True,
        adapt: bool = True,
        max_wait_s: float = 60.0,
        max_pause_s: float = MAX_PAUSE_S,
        policies: Sequence[str] | None = None,
    ) -> Plan:
        """Find the schedule with the most throughput under latency bounds, and serve by it.

        The schedule is one of two families: continuous batching with at most B running sequences,
        or round-robin allocation (RRA) of ExeGPT, which encodes B_E prompts, decodes N_D
        iterations, and so on (sections 4.1 and 5.1 of the paper). On two device groups it is
        workload-aware allocation (WAA), with the sizes of its batches and steps, and with the
        division of the devices between the groups that serves the most, if a move pays (`Move`);
        under policies "exegpt_waa_c" and "exegpt_waa_m", of those that the paper's rules give.
        No request is lost by the change, and greedy answers keep their tokens. Only a move of
        devices preempts. Except for that only the iteration shape changes; the policy's admission,
        order, retention and preemption stay. Each replica adopts the same schedule, and the plan's
        figures are those of one replica.

        The first call measures step times, unless the cache folder has them, or they were measured
        or loaded before (`measure_step_times`, `load_step_times`, and the same of groups). It waits
        for the end of the requests that run, for at most `max_wait_s`, and then measures for up to
        minutes. Requests that are submitted meanwhile start after it.
        `docs/promises/latency_bounds.md` says what a plan does not cover.

        Args:
          latency_bound: seconds that an answer of the 99th-percentile length may take from its
            admission to its end, without its time in the queue; None or `math.inf` for no bound.
          first_token_bound: seconds from its admission to its first token, likewise.
          token_bound: mean seconds per token after the first, likewise.
          lengths: prompt and output tokens of each of some answers; by default those of the newest
            answers of this runtime.
          adopt: False to compute the plan only.
          adapt: search again when the lengths of the newest answers differ from those of the plan
            (`planning.schedules.adaptation`), and adopt what is found. A bound that no schedule
            keeps any more is then missed as little as possible, and a warning says so. False to
            keep the schedule until the next call.
          max_wait_s: seconds to wait for the end of running requests, where step times have to be
            measured.
          max_pause_s: seconds for which moving devices between two groups may pause the engine, now
            and when the plan is adapted. Where a longer pause is expected, the devices stay, and
            `plan.move` says so. 0 to keep the groups.
          policies: families to choose from: "rra" and "continuous"; or on two device groups "waa",
            which compares every division of the devices, or "waa_c" and "waa_m", which have those
            that equal shares of computation and of memory give. By default all that the runtime can
            run, and under a policy of the paper, such as "exegpt_rra", that one alone.

        Raises:
          EngineBusyError: requests ran for longer than `max_wait_s`. They continue, and nothing was
            measured.
          InfeasibleBoundError: no schedule keeps the bounds; `lowest` has the lowest feasible ones.
            The present schedule stays.
          InvalidConfigError: no answer has ended yet and `lengths` is missing, or an argument is
            not allowed.
          DeviceMemoryError: one answer of such lengths is expected to exceed the page pool.
          ProcessGroupError: this process follows.
          RuntimeClosedError, EngineFailedError
        """
        bounds = LatencyBounds.of(latency_bound, first_token_bound, token_bound)
        _check_limit("max_wait_s", max_wait_s)
        _check_limit("max_pause_s", max_pause_s)
        return self._planner.plan(
            bounds,
            lengths,
            adopt=adopt,
            adapt=adapt,
            max_wait_s=max_wait_s,
            max_pause_s=max_pause_s,
            policies=policies,
        )

    def regroup(self, *, encode: int, decode: int, max_pause_s: float = MAX_PAUSE_S) -> float:
        """Move devices between the group for prompts and the group for answers.

        Requests go on: those that run keep their tokens, and their KV is computed anew. Executables
        are made before the pause, in which weights are placed. A plan in force is dropped, and its
        schedule stays. If it was adapted, the next answers make a plan for these groups, from which
        devices move no more; `plan` moves devices by itself.

        Args:
          encode, decode: devices of each group, of those that the runtime has.
          max_pause_s: seconds for which the engine may pause.

        Returns:
          The seconds for which no step ran.

        Raises:
          InvalidConfigError: there is one group, a group has stages, or the devices, their memory
            or the model do not allow these numbers.
          RegroupError: the pause is expected to be longer, weights cannot be placed in the devices'
            memory, or something failed; all serve as before.
          EngineFailedError: something failed, and the weights could not be put back; or the engine
            had failed before. The runtime serves no more.
          RuntimeClosedError
        """
        _check_limit("max_pause_s", max_pause_s)
        return self._planner.regroup(encode, decode, max_pause_s)

    def measure_step_times(self, *, rounds: int = 2, max_wait_s: float | None = None) -> StepTimes:
        """Time every shape of step that a replica has compiled, for `planning.simulate`.

        It waits until no request runs. Requests that are submitted during the call start after it.
        It overwrites cached pages. Later pages are valued by the measured times.

        Args:
          rounds: repetitions of the whole measurement; the result has the medians.
          max_wait_s: seconds to wait for the end of running requests; None for no limit.

        Raises:
          EngineBusyError: requests ran for longer than `max_wait_s`.
          InvalidConfigError: the runtime has two groups of devices, or an argument is not allowed.
          ProcessGroupError: this process follows.
          RuntimeClosedError, EngineFailedError
        """
        _check_limit("max_wait_s", max_wait_s)
        return self._planner.timings.measure_step_times(rounds, max_wait_s)

    def measure_group_times(
        self, *, rounds: int = 2, max_wait_s: float | None = None
    ) -> GroupTimes:
        """Time the steps of each of two device groups, and the handovers between them.

        `planning.simulate` takes its `costs()`. It waits until no request runs, as
        `measure_step_times` does. Each group is measured while the other one is idle.

        Raises:
          EngineBusyError: requests ran for longer than `max_wait_s`.
          InvalidConfigError: the runtime has one group of devices, or an argument is not allowed.
          ProcessGroupError: this process follows.
          RuntimeClosedError, EngineFailedError
        """
        _check_limit("max_wait_s", max_wait_s)
        return self._planner.timings.measure_group_times(rounds, max_wait_s)

    def load_step_times(self, path: str | Path) -> StepTimes:
        """Load step times that were measured on this model, device and configuration, and saved.

        Cached pages are valued by these times from now on.

        Raises:
          InvalidProfileError: the model, device or configuration differs, or the file is not valid.
          RuntimeClosedError, EngineFailedError
        """
        return self._planner.timings.load_step_times(path)

    def find_step_times(self, folder: Path) -> StepTimes | None:
        """Load the newest step times in a folder that `load_step_times` accepts; None without any.

        Cached pages are valued by these times from now on.

        Raises:
          InvalidConfigError: the runtime has two groups of devices.
          RuntimeClosedError, EngineFailedError
        """
        return self._planner.timings.find_step_times(folder)

    def load_group_times(self, path: str | Path) -> GroupTimes:
        """Load times that `GroupTimes.save` wrote, of this model on two groups like these.

        Raises:
          InvalidConfigError: the runtime has one group of devices.
          InvalidProfileError: the model, a group or the configuration differs, or the file is not
            valid.
        """
        return self._planner.timings.load_group_times(path)

    def find_group_times(self, folder: Path) -> GroupTimes | None:
        """Load the newest times in a folder that `load_group_times` accepts; None without any.

        Raises:
          InvalidConfigError: the runtime has one group of devices.
        """
        return self._planner.timings.find_group_times(folder)


def _check_limit(name: str, seconds: float | None) -> None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    most = sys.float_info.max  # whole numbers over it are no floats
    if seconds is not None and not (is_number and (0 <= seconds <= most or seconds == math.inf)):
        raise InvalidConfigError(
            f"{name}={seconds!r} is not allowed; pass a number of seconds of at least 0"
        )
