"""Records of ShareGPT, and a tokenizer of words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class WordTokenizer:
    """A tokenizer with one token per word; ids decode to their numbers."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, token_ids: Iterable[int]) -> str:
        return " ".join(map(str, token_ids))


def record_of(id: str, turns: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a record whose turns have a speaker and a text."""
    return {"id": id, "conversations": [{"from": who, "value": text} for who, text in turns]}


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(records))
    return path
