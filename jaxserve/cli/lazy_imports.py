"""Packages that others import and few commands use: their code runs at their first use."""

from __future__ import annotations

import importlib.util
import sys

# Flax imports both with `nnx`: one trains, the other draws objects in notebooks.
_RARELY_USED = ("optax", "treescope")


def import_lazily(*names: str) -> None:
    """Let the next imports of packages load nothing before one of their attributes is used.

    For a process of our own only. Packages that are imported already, or not installed, are left
    alone.
    """
    for name in names or _RARELY_USED:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
