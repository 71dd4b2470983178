"""Adapters that are loaded when a service is opened: `--adapter NAME=SOURCE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.core.errors import InvalidConfigError


def adapters_of(given: Sequence[str]) -> dict[str, str]:
    """Return the sources of adapters by name: folders, or names of the Hub.

    Raises:
      InvalidConfigError: a text is not of the form NAME=SOURCE, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, source = text.partition("=")
        if not name or not source or name in found:
            raise InvalidConfigError(
                f"--adapter {text!r} is not allowed; pass NAME=FOLDER, or NAME=org/adapter, each "
                "name once"
            )
        found[name] = source
    return found


def room_for(
    adapters: Mapping[str, str],
    max_adapters: int | None = None,
    max_adapter_rank: int | None = None,
) -> dict[str, int]:
    """Return the options of a runtime that has room for these adapters.

    Args:
      max_adapters: adapters at once; None for these alone.
      max_adapter_rank: largest rank; None for the largest of these, or the usual one without any.

    Raises:
      InvalidParamsError: a source has no adapter that can be served.
    """
    from jaxserve.models.adapter_source import AdapterSource

    ranks = [AdapterSource.of(source, None).rank for source in adapters.values()]
    room = {"max_adapters": len(ranks) if max_adapters is None else max_adapters}
    if max_adapter_rank is not None or ranks:
        room["max_adapter_rank"] = max(ranks) if max_adapter_rank is None else max_adapter_rank
    return room if room["max_adapters"] else {}
