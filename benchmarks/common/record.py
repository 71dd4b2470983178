"""A benchmark's result while it grows, for runs that may be ended before they are done."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

# Of an error's text; compilers print pages.
_MAX_REASON = 600


@final
class Record:
    """Figures by kind, written after each of them, so that an early end loses nothing.

    Args:
      path: of the file; None for none.
      budget_s: seconds from now after which nothing is begun; None for no end.
      about: what the result begins with.

    Attributes:
      result: what there is so far. `failed` has reasons by name; `skipped` names what there was
        no time for.
    """

    def __init__(self, path: Path | None, budget_s: float | None, **about: Any):
        self.result: dict[str, Any] = {**about, "failed": {}, "skipped": []}
        self._path = path
        self._end_s = None if budget_s is None else time.monotonic() + budget_s

    @property
    def is_spent(self) -> bool:
        """Whether the time is over."""
        return self._end_s is not None and time.monotonic() >= self._end_s

    def add(self, kind: str, name: str, measure: Callable[[], Any]) -> Any | None:
        """Append what `measure` returns to the list of a kind, if there is time.

        An error is recorded, and none of the others' business.

        Returns:
          The figures; None where there are none.
        """
        if self.is_spent:
            self.skip(name)
            return None
        try:
            figures = measure()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(name, error)
            return None
        self.result.setdefault(kind, []).append(figures)
        self.save()
        return figures

    def skip(self, name: str) -> None:
        """Note what there was no time for."""
        self.result["skipped"].append(name)
        self.save()

    def fail(self, name: str, error: Exception) -> None:
        """Note why there are no figures."""
        self.result["failed"][name] = reason(error)
        self.save()

    def save(self) -> None:
        """Replace the file, which is whole at any time."""
        if self._path is not None:
            write_whole(self._path, self.result)


def reason(error: Exception) -> str:
    """An error on one line, shortened."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def write_whole(path: Path, result: dict[str, Any]) -> None:
    """Write a file for people to read; whoever looks finds the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
