"""The settings of one update of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

from jaxserve.core.errors import InvalidConfigError
from jaxserve.engine.device_loop import Running
from jaxserve.engine.versions import Weights

# What an update does to the KV of requests that go on.
KV = Literal["recompute", "keep"]
_MAX_VERSION = 2**63 - 1


def check_running(running: Running) -> None:
    """Raise InvalidConfigError for a treatment of running requests that is unknown."""
    if running not in get_args(Running):
        raise InvalidConfigError(f"running={running!r} is unknown; pass one of {get_args(Running)}")


@final
@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """See `Runtime.update_params`.

    Raises:
      InvalidConfigError: a value is not allowed, or two contradict each other.
    """

    version: int | None = None
    running: Running = "finish"
    kv: KV = "recompute"
    partial: bool = False
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        check_running(self.running)
        if self.kv not in get_args(KV):
            raise InvalidConfigError(f"kv={self.kv!r} is unknown; pass one of {get_args(KV)}")
        if self.kv == "keep" and self.running != "keep":
            raise InvalidConfigError(
                f"kv='keep' with running={self.running!r} is not allowed, because no request goes "
                "on; pass running='keep', or omit kv"
            )
        most = self.max_staleness
        if most is not None and (not _is_int(most) or most < 0):
            raise InvalidConfigError(
                f"max_staleness={most!r} is not allowed; pass a number of versions of at least 0, "
                "or omit it for no bound"
            )

    def after(self, weights: Weights) -> Weights:
        """Return the weights that follow.

        Raises:
          InvalidConfigError: the version is not above that of `weights`.
        """
        version = weights.version + 1 if self.version is None else self.version
        if not _is_int(version) or not weights.version < version <= _MAX_VERSION:
            raise InvalidConfigError(
                f"version={version!r} is not allowed; the present weights have version "
                f"{weights.version}, and versions increase. Pass a larger whole number, or omit it "
                "to count"
            )
        oldest = 0 if self.max_staleness is None else version - self.max_staleness
        return Weights(version, oldest)


def _is_int(value: object) -> bool:
    """Return whether a value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
