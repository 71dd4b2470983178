"""Prompts whose answers quote them more or less.

They are chats, texts to summarise by quoting them, texts to repeat, and code to change.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

KINDS = ("chat", "summarising", "repeating", "editing")

# Characters of a text to repeat at most.
_MAX_CHARACTERS = 600
# Texts that a summary is of, and characters of each at most.
_NUM_SUMMARISED, _MAX_SUMMARISED = 6, 200
_NAMES = ("total", "count", "price", "width", "height", "weight", "score", "limit", "offset")
_VERBS = ("add", "scale", "check", "update", "merge", "split", "clean", "load")


def prompts_of(kind: str, texts: Sequence[str], seed: int) -> list[list[dict[str, Any]]]:
    """Return a chat of one message for each text.

    Args:
      kind: one of `KINDS`. "chat" is the text itself; "summarising" asks for the three of six
        texts, this one and the next ones, that matter most, word for word; "repeating" asks for the
        text again; "editing" asks for a made-up program with one name changed, which depends on the
        seed only.
    """
    rng = random.Random(seed)
    wanted = []
    for i, text in enumerate(texts):
        if kind == "summarising":
            several = [texts[(i + j) % len(texts)] for j in range(_NUM_SUMMARISED)]
            lines = [f"- {' '.join(each.split())[:_MAX_SUMMARISED]}" for each in several]
            text = (
                "These are messages of a forum:\n\n" + "\n".join(lines) + "\n\nSummarise them: "
                "quote the three most important messages word for word, as a list."
            )
        elif kind == "repeating":
            text = f"Repeat this text word for word:\n\n{text[:_MAX_CHARACTERS]}"
        elif kind == "editing":
            old, new = rng.sample(_NAMES, 2)
            text = (
                f"Write this program again, in full, with {old} renamed to {new}:\n\n"
                f"```python\n{_program(rng, old)}```"
            )
        wanted.append([{"role": "user", "content": text}])
    return wanted


def _program(rng: random.Random, name: str) -> str:
    """Return a few Python functions that use a name."""
    functions = []
    for verb in rng.sample(_VERBS, 4):
        other = rng.choice([each for each in _NAMES if each != name])
        functions.append(
            f"def {verb}_{name}({name}, {other}={rng.randrange(100)}):\n"
            f'    """Return the {name} after the {other}."""\n'
            f"    if {name} > {other}:\n"
            f"        {name} = {name} - {other}\n"
            f"    return {name} * {rng.randrange(2, 9)}\n"
        )
    return "\n\n".join(functions)
