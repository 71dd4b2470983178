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


def room_for(adapters: Mapping[str, Path]) -> dict[str, int]:
    """Return the options of a runtime that has room for these adapters.

    Raises:
      InvalidParamsError: a folder has no adapter that can be served.
    """
    from jaxserve.models.adapter_source import AdapterSource

    ranks = [AdapterSource.of(folder, None).rank for folder in adapters.values()]
    return {"max_adapters": len(ranks), "max_adapter_rank": max(ranks)} if ranks else {}
