"""The counter of compilations."""

from __future__ import annotations

import pytest

from jaxserve.execution.model_executor import CompilationCounter

pytestmark = pytest.mark.fast


def test_a_counter_whose_listener_is_gone_closes():
    """Other libraries clear all listeners of JAX, and a runtime must close all the same."""
    counter = CompilationCounter()
    counter.close()
    counter.close()
