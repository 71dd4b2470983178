"""Device, versions and commit of a run, as JSON: `python -m benchmarks.common.environment`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxserve.core.host import cpu_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxserve-runtime", "jax", "jaxlib", "flax", "numpy", "transformers")


def describe(*others: str) -> dict[str, object]:
    """Return device, host, versions and commit of this run.

    Args:
      others: packages whose versions are reported too.
    """
    import jax

    device = jax.devices()[0]
    return {
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "host_cpu": cpu_name(),
            "host_cores": len(os.sched_getaffinity(0)),
        },
        "versions": {"python": platform.python_version(), **versions(*PACKAGES, *others)},
        "commit": commit(),
    }


def describe_torch(device: Any, *packages: str) -> dict[str, object]:
    """Return PyTorch's device, versions and commit of a run of PyTorch alone."""
    import torch

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {"python": platform.python_version(), **versions(*packages)},
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of the checkout, with "-dirty" appended where files differ from it.

    Without git, return the value of JAXSERVE_COMMIT, or "unknown".
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("JAXSERVE_COMMIT", "unknown")
    return done.stdout.strip()


def status_bytes(field: str) -> int:
    """Return a field of Linux's /proc/self/status in bytes; 0 on other systems."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def versions(*packages: str) -> dict[str, str]:
    """Return the version of each package, "not installed" for a missing one."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    print(json.dumps(describe(*sys.argv[1:])))
