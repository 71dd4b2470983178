"""Seconds from an empty process to a ready runtime and its first token, cold and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.paths import ROOT
from jaxserve.core.assets import CACHE_VARIABLE, cache_folder


def start_times(model: str, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return `ready_s` and `first_token_s` of a `cold` and a `warm` start, each in a new process.

    The cold start finds neither converted weights nor compiled executables (downloads stay); the
    warm start finds those that the cold start left.

    Args:
      settings: of `Runtime.from_pretrained`.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-cold-") as folder:
        downloads = cache_folder() / "assets"
        if downloads.is_dir():
            (Path(folder) / "assets").symlink_to(downloads, target_is_directory=True)
        return {kind: _start(model, settings, folder) for kind in ("cold", "warm")}


def _start(model: str, settings: dict[str, Any], cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.startup", model, json.dumps(settings)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, CACHE_VARIABLE: cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
