"""Functions that read, in XLA's dump of a module's thunks, what the host does while it runs.

A command buffer is a CUDA graph: the host launches it, and the device carries out what is in it,
loops and their conditions too. A loop outside of one is decided on the host: after every iteration
it waits for the device and reads the predicate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

# XLA writes this file last, after it has put thunks into command buffers.
PATTERN = "*thunk_sequence_after_thunk_passes.txt"

_THUNK = re.compile(r"^(\s*)\d+: k(\w+)")
_BUFFER = "CommandBuffer"
_DECIDED = ("While", "Conditional")


@final
@dataclass(frozen=True, kw_only=True)
class HostThunks:
    """What the host does for one run of a module; bodies of loops count once.

    Attributes:
      decisions: loops and branches whose predicates it reads.
      launches: thunks that it launches one by one.
      graphs: command buffers that it launches.
      recorded: thunks in command buffers, which the device carries out alone.
    """

    decisions: int
    launches: int
    graphs: int
    recorded: int


def host_thunks(text: str) -> HostThunks:
    """Count the thunks of a dump.

    Raises:
      ValueError: the text has no thunks.
    """
    counts = dict.fromkeys(("decisions", "launches", "graphs", "recorded"), 0)
    buffer: int | None = None  # indentation of the command buffer that the line is in
    for line in text.splitlines():
        found = _THUNK.match(line)
        if found is None:
            continue
        indentation, kind = len(found[1]), found[2]
        if buffer is not None and indentation <= buffer:
            buffer = None
        if buffer is not None:
            counts["recorded"] += 1
        elif kind == _BUFFER:
            counts["graphs"] += 1
            buffer = indentation
        elif kind in _DECIDED:
            counts["decisions"] += 1
        else:
            counts["launches"] += 1
    if not any(counts.values()):
        raise ValueError("the dump has no thunks")
    return HostThunks(**counts)


def newest_dump(folder: Path, function: str) -> str:
    """Return XLA's dump of the thunks of the function that was compiled last under a name.

    Raises:
      FileNotFoundError: there is none.
    """
    dumps = [path for path in folder.glob(PATTERN) if f".jit_{function}." in path.name]
    if not dumps:
        raise FileNotFoundError(f"no dump of the thunks of {function} in {folder}")
    return max(dumps, key=lambda path: int(re.findall(r"module_(\d+)", path.name)[0])).read_text()
