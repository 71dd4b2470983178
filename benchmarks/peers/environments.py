"""A virtual environment a peer, made once and kept in the cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.assets import cache_folder


def python_of(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment that holds the requirements.

    Raises:
      subprocess.CalledProcessError: pip failed; it has said why on stderr.
    """
    key = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:8]
    folder = cache_folder() / "peers" / f"{name}-{key}"
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        print(f"installing {name} into an environment of its own (minutes, once)", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *requirements], check=True, stdout=sys.stderr)
        done.touch()
    return python
