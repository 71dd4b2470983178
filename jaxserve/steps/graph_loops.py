"""Whether loops work inside of CUDA graphs on this machine's GPU: a loop that a process runs.

XLA leaves loops out of CUDA graphs by default. Where they fail in one, they may end or hang their
process instead of raising (openxla/xla PR 35760). So `python -m jaxserve.steps.graph_loops` is a
process of its own, which ends with 0 if its loop has computed the right values five times.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.steps.executable_store import ExecutableStore

_log = logging.getLogger(__name__)

VARIABLE = "JAXSERVE_GRAPH_LOOPS"
OPTION = "xla_gpu_enable_command_buffer"
# The commands recorded in a CUDA graph: XLA's default set, and loops, which are not in it.
_RECORDED = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION"),
    *("CONDITIONAL", "WHILE"),
)
OPTIONS = {OPTION: ",".join(_RECORDED)}
# XLA leaves small programs such as the test's out of graphs.
TEST_OPTIONS: Mapping[str, Any] = {**OPTIONS, "xla_gpu_graph_min_graph_size": 1}

_COMMAND = (sys.executable, "-m", "jaxserve.steps.graph_loops")
# It starts JAX and compiles one small program.
_LIMIT_S = 120.0
_PASSED = b"passed"

NUM_CALLS = 5
# Iterations at most, rows, and their width. Values are whole numbers below 8, which products with a
# permutation keep exact in every precision.
_MOST, _ROWS, _WIDTH = 12, 16, 64

Loop = Callable[[Any, Any, Any], Any]


def graph_loops_in(environ: Mapping[str, str]) -> bool | None:
    """Return what the environment says of loops in CUDA graphs; None if it says nothing."""
    text = environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise InvalidConfigError(
            f"{VARIABLE}={text!r} is not allowed; set 1 to record decode loops in CUDA graphs, 0 "
            "to leave them out, or nothing for a test at the first start"
        )
    return None if text == "" else text == "1"


def loops_pass(
    store: ExecutableStore | None,
    key: str,
    command: Sequence[str] = _COMMAND,
    limit_s: float = _LIMIT_S,
) -> bool:
    """Return whether the test passes, or has passed at an earlier start with this key.

    A failure is logged, and is tried again at the next start.
    """
    if store is not None and store.read(key) == _PASSED:
        return True
    _log.info("testing a loop in a CUDA graph, once for this device, driver and version of JAX")
    failure = failure_of(command, limit_s)
    if failure is None:
        if store is not None:
            store.write(key, _PASSED)
        return True
    _log.warning(
        "decode loops run outside of CUDA graphs, where the host decides after every token whether "
        "to go on, because a test of loops inside failed: %s; set graph_loops=True or %s=1 to "
        "record them in spite of it, and False or 0 to leave them out without a test",
        failure,
        VARIABLE,
    )
    return False


def failure_of(command: Sequence[str], limit_s: float) -> str | None:
    """Return how the test's process fails; None if it passes.

    This process may hold most of the device's memory, so the other takes what it needs, and not a
    share.
    """
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {limit_s:g} s"
    except OSError as error:
        return f"it did not start: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")[:300]
    if done.returncode < 0:
        return f"signal {signal.Signals(-done.returncode).name} ended it: {last}"
    return last


def wrong_call(loop: Loop) -> str | None:
    """Call a loop with other buffers each time; return which call is wrong, None if none is.

    Each call has arrays of its own, which stay in memory, so that none has the address of an
    earlier one: a recorded graph that is not updated computes with earlier arrays.
    """
    kept = []
    for call in range(1, NUM_CALLS + 1):
        table, rows, until = _inputs(call)
        wanted = _computed(table, rows, until)
        given = np.zeros((_MOST, *rows.shape), np.float32), table, rows  # CPUs may not copy them
        cache, *others = jax.device_put(given)
        kept.append((given, others, loop(cache, others[0], (others[1], until))))
        got = jax.device_get(kept[-1][-1])
        if not all(np.array_equal(*pair) for pair in zip(got, wanted, strict=True)):
            return f"call {call} of {NUM_CALLS} gave wrong values"
    return None


def compiled_loop(options: Mapping[str, Any]) -> Loop:
    """Return the compiled loop of the test: it writes to a donated array, until data end it."""

    def run(cache: Any, table: Any, start: Any) -> Any:
        rows, until = start

        def goes_on(state: Any) -> Any:
            index, _, rows = state
            return (index < _MOST) & (rows[0, 0] != until)

        def step(state: Any) -> Any:
            index, cache, rows = state
            for _ in range(3):
                rows = jnp.mod(rows @ table + 1, 8)
            return index + 1, lax.dynamic_update_slice(cache, rows[None], (index, 0, 0)), rows

        return lax.while_loop(goes_on, step, (jnp.int32(0), cache, rows))

    return jax.jit(run, donate_argnums=0, compiler_options=dict(options))


def _inputs(call: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Return a table that permutes, rows, and the value of their first element at the end."""
    rng = np.random.default_rng(call)
    table = np.eye(_WIDTH, dtype=np.float32)[rng.permutation(_WIDTH)]
    rows = rng.integers(0, 8, (_ROWS, _WIDTH)).astype(np.float32)
    return table, rows, np.float32((rows[0, 0] + 1 + call) % 8)


def _computed(table: np.ndarray, rows: np.ndarray, until: np.float32) -> tuple[Any, ...]:
    cache, index = np.zeros((_MOST, *rows.shape), np.float32), 0
    while index < _MOST and rows[0, 0] != until:
        for _ in range(3):
            rows = np.mod(rows @ table + 1, 8)
        cache[index] = rows
        index += 1
    return index, cache, rows


if __name__ == "__main__":
    sys.exit(wrong_call(compiled_loop(TEST_OPTIONS)))
