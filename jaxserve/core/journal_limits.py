"""How much of conversations is kept, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import parse_bytes


@final
@dataclass(frozen=True, kw_only=True)
class JournalLimits:
    """Beyond these, whole conversations are dropped, those first that were used longest ago.

    An eighth of the limit is freed at once, since wiping what was dropped rewrites the file. A
    conversation with a turn under way, and the one just written, are never dropped.

    Attributes:
      max_conversations: kept at once.
      max_bytes: of the journal's file, or memory, in bytes or as "256MiB". 9 bytes a token of
        English and 200 a turn are about right.
      max_age_s: since a conversation's last turn; None for ever. Looked at when the journal is
        opened, and now and then as turns are written.

    Raises:
      InvalidConfigError
    """

    max_conversations: int = 10_000
    max_bytes: int | str = "256MiB"
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_conversations, int) or self.max_conversations < 1:
            raise InvalidConfigError(
                f"max_conversations={self.max_conversations!r}; give a whole number of at least 1"
            )
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes))
        age_s = self.max_age_s
        if age_s is not None and not (isinstance(age_s, int | float) and 0 < age_s < math.inf):
            raise InvalidConfigError(f"max_age_s={age_s!r}; give seconds above 0, or None")

    @property
    def num_bytes(self) -> int:
        """`max_bytes` as a number."""
        return int(self.max_bytes)
