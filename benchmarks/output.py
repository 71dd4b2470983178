"""How a benchmark's result leaves it: one JSON object on stdout, and in a file if asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def emit(result: dict[str, Any], path: Path | None) -> None:
    """Print the result on one line; write it to `path` for people to read, if there is one."""
    print(json.dumps(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
