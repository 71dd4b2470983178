"""Result files, read with errors that name the file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError

# Counters by the names that they had when some of the committed results were written.
_FORMER_NAMES = {
    "num_prefix_queried": "num_sought",
    "num_prefix_hit": "num_found",
    "num_prefix_hit_on_host": "num_found_on_host",
    "num_prefix_hit_on_disk": "num_found_on_disk",
    "num_evicted_tokens": "num_lost",
}

# What may lie in the folder, in the order of the pages.
KINDS = (
    *("offline", "policies", "online", "conversations", "flover", "simulate", "predictor"),
    *("probe", "s3", "pensieve", "scattered", "restore", "loading", "sharding", "gpu_check"),
)


class ResultFileError(InvalidConfigError):
    """A result file that cannot be read, or lacks what its kind has."""


@final
@dataclass(frozen=True)
class Result:
    """One benchmark's JSON object and where it lies."""

    path: Path
    data: dict[str, Any]
    digest: str

    @property
    def kind(self) -> str:
        return self.data["benchmark"]

    def get(self, *keys: str | int) -> Any:
        """What lies under the keys, one inside the other.

        Raises:
          ResultFileError: nothing does.
        """
        found: Any = self.data
        for depth, key in enumerate(keys):
            if isinstance(found, dict) and key not in found:
                key = _FORMER_NAMES.get(str(key), key)
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                missing = ".".join(map(str, keys[: depth + 1]))
                raise ResultFileError(
                    f"{self.path}: a result of kind {self.kind!r} has {missing!r}, and this one "
                    "does not; run the benchmark again, or remove the file"
                ) from None
        return found

    def number(self, *keys: str | int) -> float:
        """The number under the keys. Raises ResultFileError if there is none."""
        found = self.get(*keys)
        if isinstance(found, bool) or not isinstance(found, int | float):
            name = ".".join(map(str, keys))
            raise ResultFileError(f"{self.path}: {name!r} is {found!r}, and should be a number")
        return float(found)

    def optional(self, *keys: str | int) -> float | None:
        """The number under the keys; None where it was not measured."""
        try:
            return self.number(*keys)
        except ResultFileError:
            return None

    @property
    def has_peers(self) -> bool:
        """Whether other engines ran beside ours."""
        return bool(self.data.get("compare"))

    def items(self, *keys: str | int) -> list[tuple[Any, Any]]:
        """Names and values of the object under the keys, or positions and values of the list.

        Raises:
          ResultFileError: neither lies there.
        """
        found = self.get(*keys)
        if isinstance(found, dict):
            return list(found.items())
        if isinstance(found, list):
            return list(enumerate(found))
        name = ".".join(map(str, keys))
        raise ResultFileError(f"{self.path}: {name!r} is {found!r}, and should hold several")


def bound_name(result: Result) -> str:
    """Which bound an offline result is held against: earlier ones timed the products alone."""
    return "roofline" if "run_s" in result.get("bound") else "matrix products alone"


def load(folder: Path) -> list[Result]:
    """Every `*.json` of the folder, by kind and name.

    Raises:
      ResultFileError: a file that is no result, or of an unknown kind.
    """
    results = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: KINDS.index(result.kind))


def _read(path: Path) -> Result:
    try:
        text = path.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise ResultFileError(f"{path} cannot be read as JSON: {error}") from error
    kind = data.get("benchmark") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise ResultFileError(
            f"{path}: 'benchmark' is {kind!r}, and should be one of {', '.join(KINDS)}; "
            "keep other files elsewhere"
        )
    return Result(path, data, hashlib.sha256(path.name.encode() + text).hexdigest())
