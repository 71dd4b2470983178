"""The counter of compilations."""

from __future__ import annotations

import pytest

from jaxserve.execution.compilation import steady
from jaxserve.execution.model_executor import CompilationCounter
from jaxserve.steps.executable_store import ExecutableStore

pytestmark = pytest.mark.fast


def test_a_counter_whose_listener_is_gone_closes():
    """Other libraries clear all listeners of JAX, and a runtime must close all the same."""
    counter = CompilationCounter()
    counter.close()
    counter.close()


def test_starts_with_similar_free_memory_have_a_pool_of_one_size(tmp_path):
    """A size that another free memory brought is remembered beside the first one."""
    store, found = ExecutableStore(tmp_path), []
    for num_pages in (1000, 960, 1200, 600, 1000, 590):
        found.append(steady(num_pages, 5000, store, "model"))
    assert found == [896, 896, 896, 512, 896, 512]
    assert steady(1000, 1000, store, "a small model, all of whose pages fit") == 1000
