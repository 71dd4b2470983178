"""Where a figure comes from: device, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import jax

from jaxserve.core.host import cpu_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "jax", "jaxlib", "flax", "numpy", "transformers")


def describe() -> dict[str, object]:
    """Device, host, versions and commit of this run."""
    device = jax.devices()[0]
    return {
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "host_cpu": cpu_name(),
            "host_cores": len(os.sched_getaffinity(0)),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit(),
    }


def commit() -> str:
    """The checkout's commit, "-dirty" behind it where files differ; "unknown" without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
