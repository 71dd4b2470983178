"""Step times saved in a folder, one file for each origin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from jaxserve.core.errors import InvalidProfileError
from jaxserve.planning.group_times import GroupTimes
from jaxserve.planning.step_times import Origin, StepTimes

_Times = TypeVar("_Times", StepTimes, GroupTimes)


def find_step_times(folder: Path, origin: Origin) -> StepTimes | None:
    """Return the newest step times in a folder that were measured on `origin`, if there are any.

    Damaged files and those of another model, device or configuration are skipped.
    """
    return _found(folder, "steps", partial(StepTimes.load, expected=origin))


def find_group_times(folder: Path, origins: Sequence[Origin]) -> GroupTimes | None:
    """Return the newest times of two groups, as `find_step_times` does."""
    return _found(folder, "groups", partial(GroupTimes.load, expected=origins))


def keep_step_times(folder: Path, times: StepTimes) -> Path:
    """Save step times in a folder, replacing those of the same origin, and return the file.

    Raises:
      OSError: the file cannot be written.
    """
    return _kept(folder, "steps", [times.origin], times)


def keep_group_times(folder: Path, times: GroupTimes) -> Path:
    """Save times of two groups in a folder, as `keep_step_times` does."""
    return _kept(folder, "groups", [group.origin for group in times.groups], times)


def _found(folder: Path, kind: str, load: Callable[[Path], _Times]) -> _Times | None:
    try:
        paths = sorted(folder.glob(f"{kind}-*.json"), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return None
    for path in paths:
        try:
            return load(path)
        except InvalidProfileError:
            continue
    return None


def _kept(folder: Path, kind: str, origins: Sequence[Origin], times: _Times) -> Path:
    identity = "".join(origin.identity for origin in origins)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = folder / f"{kind}-{digest}.json"
    partial_path = path.with_suffix(".partial")
    times.save(partial_path)
    partial_path.replace(path)
    return path
