"""Application of the code blocks of a page of the documentation to a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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
            file.parent.mkdir(exist_ok=True)
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
    return [Block(path, kind, body) for path, kind, body in _BLOCK.findall(text)]


def package_with(page: str, folder: Path) -> Path:
    """Copy our packages into `folder`, apply the blocks of a page, and return `folder`."""
    ignore = shutil.ignore_patterns("__pycache__")
    found = blocks(page)
    changed = {block.path.split("/")[0] for block in found}
    for package in {"jaxserve", "pallas_kernels", "predictor", "sharding"} | changed:
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=ignore)
    for block in found:
        block.apply(folder)
    return folder


def run_with(package: Path, program: str) -> str:
    """Return the output of a program in a separate process, where the package is the changed copy.

    Its argument is the folder of the copy.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(package)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])},
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
