"""Seconds from an empty process to a ready runtime and its first token, cold and warm.

Cold: neither converted weights nor compiled executables in the cache (downloads stay). Warm: the
same again, with what the cold start left. Each runs in a process of its own.

`python -m benchmarks.startup MODEL SETTINGS` is that process; SETTINGS is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from jaxserve.core.assets import CACHE_VARIABLE, cache_folder


def measure(model: str, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """`cold` and `warm`, each with `ready_s` and `first_token_s`."""
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


def main() -> None:
    """Start once in this process, and print the seconds it took as JSON."""
    begin_s = time.perf_counter()
    from jaxserve import Runtime, SamplingParams

    model, settings = sys.argv[1], json.loads(sys.argv[2])
    with Runtime.from_pretrained(model, progress=False, **settings) as rt:
        ready_s = time.perf_counter() - begin_s
        rt.generate("Hello", SamplingParams(max_tokens=1), progress=False)
        first_token_s = time.perf_counter() - begin_s
    print(json.dumps({"ready_s": ready_s, "first_token_s": first_token_s}))


if __name__ == "__main__":
    main()
