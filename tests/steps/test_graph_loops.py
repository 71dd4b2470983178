"""Loops in CUDA graphs are tested before they are used, in a process that may crash or hang."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.steps.executable_store import ExecutableStore
from jaxserve.steps.graph_loops import (
    NUM_CALLS,
    OPTION,
    OPTIONS,
    TEST_OPTIONS,
    compiled_loop,
    failure_of,
    graph_loops_in,
    loops_pass,
    wrong_call,
)
from jaxserve.steps.programs import loop_options

# Children that end as a test of loops may end.
PASSES = (sys.executable, "-c", "")
RAISES = (sys.executable, "-c", "raise RuntimeError('graph_exec_ is nullptr')")
CRASHES = (sys.executable, "-c", "import os, sys; print('boom', file=sys.stderr); os.abort()")
HANGS = (sys.executable, "-c", "import time; time.sleep(60)")


def test_a_right_loop_passes():
    """XLA knows the names of the options; on a CPU they change nothing."""
    assert wrong_call(compiled_loop(TEST_OPTIONS)) is None


def test_a_graph_with_old_addresses_is_found_at_the_second_call():
    """An executable that computes with the arrays of its first call fails."""
    right, first = compiled_loop({}), []

    def stale(*arrays: Any) -> Any:
        first.append(right(*arrays))
        return first[0]

    assert wrong_call(stale) == f"call 2 of {NUM_CALLS} gave wrong values"


def test_calls_share_no_addresses():
    """Otherwise a graph that is not updated would pass."""
    right, addresses = compiled_loop({}), []

    def noted(cache: Any, table: Any, start: Any) -> Any:
        addresses.extend(each.unsafe_buffer_pointer() for each in (cache, table, start[0]))
        return right(cache, table, start)

    assert wrong_call(noted) is None
    assert len(set(addresses)) == len(addresses) == 3 * NUM_CALLS


@pytest.mark.fast
@pytest.mark.parametrize(
    ("command", "limit_s", "wanted"),
    [
        (PASSES, 60, None),
        (RAISES, 60, "RuntimeError: graph_exec_ is nullptr"),
        (CRASHES, 60, "signal SIGABRT ended it: boom"),
        (HANGS, 0.5, "it did not end within 0.5 s"),
        (("/no/such/program",), 60, "it did not start"),
    ],
    ids=["passes", "raises", "crashes", "hangs", "missing"],
)
def test_a_failure_has_a_reason(command, limit_s, wanted):
    """This process goes on in any case."""
    failure = failure_of(command, limit_s)
    assert failure == wanted or (wanted is not None and wanted in str(failure))


@pytest.mark.fast
def test_a_failed_test_leaves_loops_out_with_a_warning(tmp_path, caplog):
    """It runs again at the next start; one that passes does not."""
    store = ExecutableStore(tmp_path)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert not loops_pass(store, "key", RAISES)
    (line,) = [each.getMessage() for each in caplog.records]
    assert "graph_exec_ is nullptr" in line and "JAXSERVE_GRAPH_LOOPS=1" in line
    assert loops_pass(store, "key", PASSES)
    assert loops_pass(store, "key", RAISES), "it passed before"
    assert not loops_pass(store, "another driver", RAISES)
    assert not loops_pass(None, "key", RAISES)


@pytest.mark.fast
def test_options_and_environment_decide_without_a_test(monkeypatch):
    """A choice in `XLA_FLAGS` comes first, then the option, then the variable."""
    monkeypatch.setenv("XLA_FLAGS", "")
    gpu: Any = SimpleNamespace(
        mesh=None, whole=SimpleNamespace(device_set=[SimpleNamespace(platform="cuda")])
    )
    for variable, wanted, options in (
        ("", True, OPTIONS),
        ("", False, None),
        ("0", True, OPTIONS),
        ("0", None, None),
        ("1", None, OPTIONS),
        ("", None, OPTIONS),  # JAX runs on a CPU here: this compiles for a GPU elsewhere
    ):
        monkeypatch.setenv("JAXSERVE_GRAPH_LOOPS", variable)
        assert loop_options(gpu, wanted, None) == options
    assert "WHILE" in OPTIONS[OPTION].split(",")
    monkeypatch.setenv("XLA_FLAGS", f"--{OPTION}=")
    assert loop_options(gpu, True, None) is None


@pytest.mark.fast
def test_other_values_of_the_variable_are_refused():
    """A value that would be taken for the other one is an error."""
    assert [graph_loops_in({"JAXSERVE_GRAPH_LOOPS": text}) for text in ("1", "0", "")] == [
        *(True, False, None)
    ]
    with pytest.raises(InvalidConfigError, match="set 1 to record"):
        graph_loops_in({"JAXSERVE_GRAPH_LOOPS": "off"})
