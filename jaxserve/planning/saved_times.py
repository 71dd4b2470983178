"""Step times that are kept in a folder, one file for each origin."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxserve.core.errors import InvalidProfileError
from jaxserve.planning.origin import Origin
from jaxserve.planning.step_times import StepTimes


def find_step_times(folder: Path, origin: Origin) -> StepTimes | None:
    """Return the newest step times in a folder that were measured on `origin`; None without any.

    Files that are damaged, or of another model, device or configuration, are passed over.
    """
    try:
        paths = sorted(folder.glob("steps-*.json"), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return None
    for path in paths:
        try:
            return StepTimes.load(path, expected=origin)
        except InvalidProfileError:
            continue
    return None


def keep_step_times(folder: Path, times: StepTimes) -> Path:
    """Write step times into a folder, and return the file; those of the same origin are replaced.

    Raises:
      OSError: the file cannot be written.
    """
    digest = hashlib.sha256(times.origin.identity.encode()).hexdigest()[:16]
    path = folder / f"steps-{digest}.json"
    partial = path.with_suffix(".partial")
    times.save(partial)
    partial.replace(path)
    return path
