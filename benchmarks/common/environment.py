"""Where a figure comes from: device, versions, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax

from jaxserve.core.host import cpu_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "jax", "jaxlib", "flax", "numpy", "transformers")


def describe(*others: str) -> dict[str, object]:
    """Device, host, versions and commit of this run.

    Args:
      others: packages whose versions count too.
    """
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


def commit() -> str:
    """The checkout's commit, "-dirty" behind it where files differ.

    Without git, what JAXSERVE_COMMIT says; else "unknown".
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


def versions(*packages: str) -> dict[str, str]:
    """Of packages by name, "not installed" for those that are missing."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    print(json.dumps(describe(*sys.argv[1:])))
