"""Seconds of tasks: of the thesis's GPU from its figures, or measured on this device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, final

from benchmarks.cells.applications import Sizes

# The thesis's V100 computes a step of an LSTM of 1024 for 64 rows in 185 us and for 512 in 784 us
# (2.7.3); below 64 rows the time does not change (figure 2.3).
_FLOOR_S, _FULL_S, _FULL_BATCH = 185e-6, 784e-6, 512
# With scheduling and gathering a step takes 250 us at 64 rows, and 87 % of the throughput is left
# at 512 (2.7.3).
_GATHER_S = {64: 250e-6 - _FLOOR_S, _FULL_BATCH: _FULL_S / 0.87 - _FULL_S}
_MIN_CALLS, _MIN_SECONDS = 5, 0.05


def products(sizes: Sizes) -> dict[str, int]:
    """Return the floating-point operations of each cell's products for one row."""
    h = sizes.hidden_size
    lstm = 2 * 2 * h * 4 * h
    return {
        "lstm": lstm,
        "encoder": lstm,
        "decoder": lstm + 2 * h * sizes.vocab_size,
        "leaf": 2 * h * 3 * h,
        "internal": 2 * 2 * h * 5 * h,
    }


@final
@dataclass(frozen=True)
class ThesisCost:
    """The thesis's GPU: a floor of 185 us, and above it a rate of products, from its two points.

    That rate, 11 TFLOP/s, is 70 % of the V100's peak. Cells other than the LSTM have the same
    floor; the thesis gives no times for them.

    Attributes:
      gathers: whether tasks move rows, which costs what the thesis says; linear between its points.
    """

    flops: Mapping[str, int]
    gathers: bool

    def task_s(self, cell: str, batch: int) -> float:
        rate = self.flops["lstm"] * _FULL_BATCH / _FULL_S
        seconds = max(_FLOOR_S, self.flops[cell] * batch / rate)
        return seconds + gather_s(batch) if self.gathers else seconds

    def host_s(self, num_tasks: int) -> float:
        """Return nothing: the thesis's 250 us have the host's time in them."""
        return 0.0


def gather_s(batch: int) -> float:
    """Return the seconds that scheduling and gathering add to a task, after the thesis."""
    (small, at_small), (large, at_large) = _GATHER_S.items()
    return at_small + (at_large - at_small) * (batch - small) / (large - small)


@final
@dataclass(frozen=True)
class TimedCost:
    """Measured seconds of each cell and batch size, without the host."""

    seconds: Mapping[str, Mapping[int, float]]

    def task_s(self, cell: str, batch: int) -> float:
        """Return the seconds of the smallest measured size that holds the batch.

        A batch that is larger than every measured one takes as long a row as the largest.
        """
        sizes = self.seconds[cell]
        fitting = [size for size in sizes if size >= batch]
        if fitting:
            return sizes[min(fitting)]
        largest = max(sizes)
        return sizes[largest] * batch / largest

    def host_s(self, num_tasks: int) -> float:
        return 0.0


def timed(cells: Sequence[Any], max_batch: Mapping[str, int]) -> dict[str, Any]:
    """Return the seconds of every cell on JAX's first device, by batch sizes to `max_batch`.

    Returns:
      `bare`: of the module alone; `gathered`: with states read from rows of a pool and written back
      to other rows, in place, as every task of a runtime does.
    """
    from benchmarks.cells.contenders import powers

    found: dict[str, Any] = {"bare": {}, "gathered": {}}
    for cell in cells:
        sizes = powers(max_batch[cell.name])
        for kind in found:
            times = {size: _time(cell, size, gathers=kind == "gathered") for size in sizes}
            found[kind][cell.name] = times
    return found


def _time(cell: Any, batch: int, *, gathers: bool) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    module = cell.cell.module if cell.is_loop else cell.module
    graphdef, params = nnx.split(module)
    inputs = {
        name: jnp.zeros((batch, *spec.shape), spec.dtype) for name, spec in cell.inputs.items()
    }
    states = {name: spec for name, spec in cell.outputs.items() if spec.shape}
    if not gathers:
        call = jax.jit(lambda params: nnx.merge(graphdef, params)(**inputs))
        return _seconds(lambda _: call(params), None)
    num_rows = 4 * batch
    rows = np.random.default_rng(0).permutation(num_rows).astype(np.int32)
    pool_of = {name: jnp.zeros((num_rows, *spec.shape)) for name, spec in states.items()}
    # The pool that an input of a state's shape is read from; TreeLSTM reads each of two twice.
    reads = [name for name, spec in cell.inputs.items() if spec.shape]

    @partial(jax.jit, donate_argnums=1)
    def call(params: Any, pools: dict[str, jax.Array]) -> dict[str, jax.Array]:
        names = list(pools)
        given = {
            name: pools[names[i % len(names)]][rows[:batch] if i < 2 else rows[batch : 2 * batch]]
            for i, name in enumerate(reads)
        }
        pools, given = jax.lax.optimization_barrier((pools, given))
        outputs = nnx.merge(graphdef, params)(**{**inputs, **given})
        return {name: pools[name].at[rows[-batch:]].set(outputs[name]) for name in names}

    return _seconds(lambda pools: call(params, pools), pool_of)


def _seconds(call: Any, state: Any) -> float:
    """Return the median seconds of a call, whose result is its next argument."""
    import jax

    state = jax.block_until_ready(call(state))
    times: list[float] = []
    while len(times) < _MIN_CALLS or sum(times) < _MIN_SECONDS:
        begin_s = time.perf_counter()
        state = jax.block_until_ready(call(state))
        times.append(time.perf_counter() - begin_s)
    return median(times)
