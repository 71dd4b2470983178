"""Limits on the number, size and age of the conversations in a journal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import parse_bytes


@final
@dataclass(frozen=True, kw_only=True)
class JournalLimits:
    """The limits of a journal. Beyond them, the least recently used conversations are dropped.

    Dropping frees an eighth of a limit at once, since erasing rewrites the file. A conversation
    that is being answered, and the one just written, are never dropped.

    Attributes:
      max_conversations: maximum number of conversations.
      max_bytes: maximum size of the journal's file or memory, in bytes or as "256MiB". A token of
        English takes about 9 bytes, a turn about 200.
      max_age_s: maximum time since a conversation's last turn; None for no limit. It is checked
        when the journal is opened and at some of the writes.

    Raises:
      InvalidConfigError: a limit is out of range.
    """

    max_conversations: int = 10_000
    max_bytes: int | str = "256MiB"
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_conversations, int) or self.max_conversations < 1:
            raise InvalidConfigError(
                f"max_conversations={self.max_conversations!r} is not allowed; pass a whole number "
                "of at least 1"
            )
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes))
        age_s = self.max_age_s
        if age_s is not None and not (isinstance(age_s, int | float) and 0 < age_s < math.inf):
            raise InvalidConfigError(
                f"max_age_s={age_s!r} is not allowed; pass seconds above 0, or None"
            )

    @property
    def num_bytes(self) -> int:
        """`max_bytes` in bytes."""
        return int(self.max_bytes)
