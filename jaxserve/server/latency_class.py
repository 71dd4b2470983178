"""Latency classes: bounds with a name, which a header of a request chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError, InvalidSamplingParamsError
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams

HEADER = "x-latency-class"
# What each bound is called in the text of a class.
_NAMES = {name.removesuffix("_bound"): name for name in BOUND_NAMES}


@final
@dataclass(frozen=True)
class LatencyClass:
    """Bounds of a class, by their names in `SamplingParams`; none for no class."""

    bounds: Mapping[str, float]

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with these bounds; of one that both give, the tighter one counts."""
        given = params.bounds
        tighter: dict[str, Any] = {
            name: min(s, given.get(name, s)) for name, s in self.bounds.items()
        }
        return replace(params, **tighter)


def parse_latency_classes(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the bounds of classes by name; see `ServerOptions.latency_classes`.

    Args:
      texts: one of each class, such as "chat=latency:2,first_token:0.5".

    Raises:
      InvalidConfigError: a text has another form, a bound is not allowed, or a name is twice there.
    """
    classes: dict[str, dict[str, float]] = {}
    for name, bounds in map(_parsed, texts):
        if name in classes:
            raise InvalidConfigError(f"the latency class {name!r} is given twice; give it once")
        classes[name] = bounds
    return classes


def _parsed(text: str) -> tuple[str, dict[str, float]]:
    name, _, rest = text.partition("=")
    bounds: dict[str, float] = {}
    try:
        for part in rest.split(","):
            kind, seconds = part.split(":")
            if _NAMES[kind] in bounds:
                raise ValueError
            bounds[_NAMES[kind]] = float(seconds)
        if not name or not name.isascii() or not name.isprintable() or name != name.strip():
            raise ValueError
    except (KeyError, ValueError):
        raise InvalidConfigError(
            f"the latency class {text!r} is not allowed; pass a name and seconds, each bound at "
            "most once, e.g. chat=latency:2,first_token:0.5,token:0.05"
        ) from None
    check_bounds(name, bounds)
    return name, bounds


def check_bounds(name: str, bounds: Mapping[str, float]) -> None:
    """Check the bounds of a class.

    Raises:
      InvalidConfigError: there is none, or one is not allowed; the message names the class.
    """
    unknown = sorted(set(bounds) - set(BOUND_NAMES))
    if unknown or not bounds:
        raise InvalidConfigError(
            f"latency class {name!r} has the bounds {sorted(bounds)}; pass one or more of "
            f"{', '.join(BOUND_NAMES)}"
        )
    try:
        SamplingParams(**dict[str, Any](bounds))
    except InvalidSamplingParamsError as error:
        raise InvalidConfigError(f"latency class {name!r}: {error}") from error
