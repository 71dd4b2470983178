"""Application of the code blocks of a page of the documentation to a copy of the sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# A sentence that ends with a file's name, and the code block after it.
_BLOCK = re.compile(r"`(\w[\w/]*\.py)`:\n\n```(python|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A whole file ("python"), or changes to an existing file ("diff", hunks between @@ lines)."""

    path: str
    kind: Literal["python", "diff"]
    text: str

    def apply(self, root: Path) -> None:
        """Write the file, or change it. Every hunk must match at exactly one place."""
        file = root / self.path
        if self.kind == "python":
            assert not file.exists(), f"{self.path} is there already"
            file.write_text(self.text, encoding="utf-8")
            return
        text = file.read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", self.text, flags=re.MULTILINE):
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            assert text.count(old) == 1, f"{self.path} has {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that name a file, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(path, kind, body) for path, kind, body in _BLOCK.findall(text)]  # type: ignore[arg-type]
