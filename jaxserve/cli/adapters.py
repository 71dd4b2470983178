"""Adapters that are loaded when a service is opened: `--adapter NAME=FOLDER`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxserve.core.errors import InvalidConfigError


def adapters_of(given: Sequence[str]) -> dict[str, Path]:
    """Return the folders of adapters by name.

    Raises:
      InvalidConfigError: a text is not of the form NAME=FOLDER, or a name comes twice.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder or name in found:
            raise InvalidConfigError(
                f"--adapter {text!r} is not allowed; pass NAME=FOLDER, each name once"
            )
        found[name] = Path(folder)
    return found


def room_for(
    adapters: Mapping[str, Path],
    max_adapters: int | None = None,
    max_adapter_rank: int | None = None,
) -> dict[str, int]:
    """Return the options of a runtime that has room for these adapters.

    Args:
      max_adapters: adapters at once; None for these alone.
      max_adapter_rank: largest rank; None for the largest of these, or the usual one without any.

    Raises:
      InvalidParamsError: a folder has no adapter that can be served.
    """
    from jaxserve.models.adapter_source import AdapterSource

    ranks = [AdapterSource.of(folder, None).rank for folder in adapters.values()]
    room = {"max_adapters": len(ranks) if max_adapters is None else max_adapters}
    if max_adapter_rank is not None or ranks:
        room["max_adapter_rank"] = max(ranks) if max_adapter_rank is None else max_adapter_rank
    return room if room["max_adapters"] else {}
