"""Time of products with weights in few bits, against the roofline and the dense product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.roofline import Machine
from benchmarks.common.timing import seconds
from benchmarks.kernels.timing import CACHE_BYTES, CALLS
from pallas_kernels import matmul
from pallas_kernels.quantised_matmul.shapes import FORMATS, Configuration, make_inputs

# The most weights that calls take in turn, so that no cache of the device has the next one.
_MAX_WEIGHTS = 8


def measure(configuration: Configuration, machine: Machine) -> dict[str, Any]:
    """Return the figures of one call, and the seconds of XLA's and of the dense product."""
    shape = configuration.shape
    inputs = make_inputs(configuration, seed=0)
    x, weight = inputs["x"], inputs["weight"]
    num_weights = -(-CACHE_BYTES // sum(leaf.nbytes for leaf in jax.tree.leaves(weight)))
    weights = [jax.tree.map(jnp.copy, weight) for _ in range(min(num_weights, _MAX_WEIGHTS))]
    function, _ = configuration.call()
    own_s = _seconds(function, x, weights)
    xla_s = _seconds(partial(function, implementation="xla"), x, weights[:1])
    got = jax.jit(function)(**inputs)
    with jax.default_matmul_precision("highest"):
        wanted = partial(function, implementation="xla")(x.astype(jnp.float32), weight)
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted)
    out = got[0].size
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    num_bytes += x.nbytes + shape.tokens * out * x.dtype.itemsize
    flops = 2 * shape.tokens * shape.depth * out
    del weights, weight, inputs
    dense = jnp.ones((shape.depth, out), x.dtype)
    # Tensor cores multiply int8 twice as fast.
    rate = 2 if FORMATS[configuration.format].rounds_activations else 1
    bound_s = machine.step_s(flops=flops / rate, num_bytes=num_bytes)
    return {
        "shape": str(configuration),
        "tokens": shape.tokens,
        "seconds": own_s,
        "bound_s": bound_s,
        "of_bound": bound_s / own_s,
        "bytes_per_s": num_bytes / own_s,
        "flops_per_s": flops / own_s,
        "error": float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)),
        "xla_s": xla_s,
        "dense_s": _seconds(matmul, x, [dense]),
    }


def _seconds(product: Callable[..., jax.Array], x: jax.Array, weights: list[Any]) -> float:
    """Return the seconds of one product in a chain, in which each waits for the one before."""

    def chain(x: jax.Array, weights: list[Any]) -> jax.Array:
        for i in range(CALLS):
            out = product(x, weights[i % len(weights)]).reshape(len(x), -1)
            x = x + out[:, :1] * jnp.asarray(1e-6, x.dtype)
        return x

    return seconds(jax.jit(chain), x, weights) / CALLS
