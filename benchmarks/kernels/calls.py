"""Time of all kernels except attention, in chains of calls: writes, copies, cells, products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.roofline import Machine, of_bound
from benchmarks.common.timing import seconds
from benchmarks.kernels.timing import CACHE_BYTES, CALLS, relative_error
from jaxserve.kernels import RowsAt, grouped_matmul, matmul
from jaxserve.kernels.fused_matmul.shapes import Configuration as Fused
from jaxserve.kernels.fused_matmul.shapes import make_inputs as make_fused_inputs
from jaxserve.kernels.gated_cell.shapes import Configuration as Cell
from jaxserve.kernels.gated_cell.shapes import make_inputs as make_cell_inputs
from jaxserve.kernels.grouped_matmul.shapes import GroupedShape
from jaxserve.kernels.grouped_matmul.shapes import make_inputs as make_grouped_inputs
from jaxserve.kernels.kv_write.shapes import Configuration as Write
from jaxserve.kernels.kv_write.shapes import make_inputs as make_write_inputs
from jaxserve.kernels.page_copy.shapes import Configuration as Copy
from jaxserve.kernels.quantised_matmul.shapes import FORMATS
from jaxserve.kernels.quantised_matmul.shapes import Configuration as Product
from jaxserve.kernels.quantised_matmul.shapes import make_inputs as make_product_inputs

# Sets of weights that calls use in turns, so that no cache of the device has them.
_WEIGHTS = 4


def measure_move(configuration: Write | Copy | Cell | Fused, bytes_per_s: float) -> dict[str, Any]:
    """Return the figures of one call; `bytes_per_s` is the copy bandwidth, reads and writes."""
    num_bytes: int
    if isinstance(configuration, Write):
        num_bytes, time_s = configuration.shape.moved_bytes, _write_seconds
    elif isinstance(configuration, Cell):
        num_bytes, time_s = configuration.shape.moved_bytes, _cell_seconds
    elif isinstance(configuration, Fused):
        num_bytes, time_s = configuration.moved_bytes, _fused_seconds
    else:
        num_bytes, time_s = 2 * configuration.shape.copied_bytes, _copy_seconds
    seconds: Callable[[Any, str | None], float] = time_s
    own_s, bound_s = seconds(configuration, None), num_bytes / bytes_per_s
    return {
        "shape": str(configuration),
        **of_bound(own_s, bound_s, num_bytes=num_bytes),
        "xla_s": seconds(configuration, "xla"),
    }


def _fused_seconds(configuration: Fused, implementation: str | None) -> float:
    function, _ = configuration.call()
    inputs = make_fused_inputs(configuration, seed=0)
    x = inputs.pop("x")
    given = [{**inputs, "weight": jnp.copy(inputs["weight"])} for _ in range(_WEIGHTS)]

    def product(x: jax.Array, given: dict[str, Any]) -> jax.Array:
        return function(x=x, **given, implementation=implementation)

    return _product_seconds(product, x, given)


def _write_seconds(configuration: Write, implementation: str | None) -> float:
    function, _ = configuration.call()
    inputs = make_write_inputs(configuration.shape, seed=0, layers=4)
    cache = {name: inputs.pop(name) for name in configuration.donated}
    layers = 4

    def chain(cache: dict[str, jax.Array], inputs: dict[str, Any]) -> tuple[Any, Any]:
        queries = []
        for i in range(CALLS):
            q, *written = function(
                **{**inputs, **cache}, layer=i % layers, implementation=implementation
            )
            cache = dict(zip(cache, written, strict=False))
            queries.append(q)
        return cache, queries

    return _chain_seconds(chain, cache, inputs)


def _copy_seconds(configuration: Copy, implementation: str | None) -> float:
    function, _ = configuration.call()
    shape = configuration.shape
    # Other pages at every call, so that no cache of the device has them.
    order = np.random.default_rng(0).permutation(shape.num_pages)
    places = np.resize(order, (CALLS, 2 * shape.count)).astype(np.int32)
    source, target = jnp.asarray(places[:, : shape.count]), jnp.asarray(places[:, shape.count :])
    pages = jnp.zeros(shape.array, shape.dtype)
    values = jnp.ones((shape.layers, shape.count, *shape.page), shape.dtype)
    call = partial(function, implementation=implementation)

    def chain(pages: jax.Array, places: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        gathered = []
        for source, target in zip(*places, strict=True):
            if configuration.operation == "gather_pages":
                gathered.append(call(pages, source))
            elif configuration.operation == "scatter_pages":
                pages = call(pages, target, values)
            else:
                pages = call(pages, source, target)
        return pages, gathered

    return _chain_seconds(chain, pages, (source, target))


def _cell_seconds(configuration: Cell, implementation: str | None) -> float:
    function, _ = configuration.call()
    sets = [make_cell_inputs(configuration.shape, seed) for seed in range(_WEIGHTS)]

    def turned(number: int) -> dict[str, Any]:
        """Return operands of a call, whose rows no other call has in this order."""
        return jax.tree.map(
            lambda leaf: (
                RowsAt(leaf.values, jnp.flip(jnp.roll(leaf.index, number)))
                if isinstance(leaf, RowsAt)
                else leaf
            ),
            sets[number % _WEIGHTS],
            is_leaf=lambda leaf: isinstance(leaf, RowsAt),
        )

    def chain(state: jax.Array, calls: list[dict[str, Any]]) -> tuple[Any, Any]:
        return state, [function(**call, implementation=implementation) for call in calls]

    return _chain_seconds(chain, jnp.zeros(()), [turned(number) for number in range(CALLS)])


def _chain_seconds(chain: Callable[..., tuple[Any, Any]], state: Any, arguments: Any) -> float:
    compiled, held = jax.jit(chain, donate_argnums=0), [state]

    def call() -> tuple[Any, Any]:
        held[0], rest = compiled(held[0], arguments)
        return held[0], rest

    return seconds(call) / CALLS


# The most weights that calls take in turn, so that no cache of the device has the next one.
_MAX_WEIGHTS = 8


def measure_product(configuration: Product, machine: Machine) -> dict[str, Any]:
    """Return the figures of one call, and the seconds of XLA's and of the dense product."""
    shape = configuration.shape
    inputs = make_product_inputs(configuration, seed=0)
    x, weight = inputs["x"], inputs["weight"]
    num_weights = -(-CACHE_BYTES // sum(leaf.nbytes for leaf in jax.tree.leaves(weight)))
    weights = [jax.tree.map(jnp.copy, weight) for _ in range(min(num_weights, _MAX_WEIGHTS))]
    function, _ = configuration.call()
    own_s = _product_seconds(function, x, weights)
    xla_s = _product_seconds(partial(function, implementation="xla"), x, weights[:1])
    got = jax.jit(function)(**inputs)
    with jax.default_matmul_precision("highest"):
        wanted = partial(function, implementation="xla")(x.astype(jnp.float32), weight)
    out, error = got[0].size, relative_error(got, wanted)
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
        **of_bound(own_s, bound_s, num_bytes=num_bytes),
        "flops_per_s": flops / own_s,
        "error": error,
        "xla_s": xla_s,
        "dense_s": _product_seconds(matmul, x, [dense]),
    }


def measure_groups(shape: GroupedShape, machine: Machine) -> dict[str, Any]:
    """Return the figures of one call, and the seconds of XLA's product and of a loop.

    Each token belongs to one of the matrices, all equally likely. Only those with tokens are read.
    """
    even = np.full(shape.matrices, 1 / shape.matrices)
    sizes = np.random.default_rng(0).multinomial(shape.tokens, even)
    given = jax.jit(partial(make_grouped_inputs, shape))(sizes.astype(np.int32))
    x = given.pop("x")

    def product(x: jax.Array, given: dict[str, jax.Array], implementation: Any = None) -> jax.Array:
        return grouped_matmul(x, **given, implementation=implementation)

    own_s = _product_seconds(product, x, [given])
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(_in_loop)(x.astype(jnp.float32), given)
    matrix_bytes = shape.inputs * shape.columns * x.dtype.itemsize
    num_bytes = int(np.count_nonzero(sizes)) * matrix_bytes
    num_bytes += x.nbytes + shape.tokens * shape.columns * x.dtype.itemsize
    flops = 2 * shape.tokens * shape.inputs * shape.columns
    bound_s = machine.step_s(flops=flops, num_bytes=num_bytes)
    return {
        "shape": str(shape),
        "tokens": shape.tokens,
        **of_bound(own_s, bound_s, num_bytes=num_bytes),
        "flops_per_s": flops / own_s,
        "error": relative_error(jax.jit(product)(x, given), wanted),
        "xla_s": _product_seconds(partial(product, implementation="xla"), x, [given]),
        "loop_s": _product_seconds(_in_loop, x, [given]),
    }


def _in_loop(x: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    """Multiply all tokens with one matrix after the other; a token keeps the product of its own."""
    weight, ends = given["weight"], jnp.cumsum(given["sizes"])
    matrix = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")

    def one(number: jax.Array, out: jax.Array) -> jax.Array:
        product = jnp.dot(x, weight[number].astype(x.dtype))
        return jnp.where((matrix == number)[:, None], product, out)

    nothing = jnp.zeros((len(x), weight.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, len(weight), one, nothing)


def _product_seconds(product: Callable[..., jax.Array], x: jax.Array, weights: list[Any]) -> float:
    """Return the seconds of one product in a chain, in which each waits for the previous one."""

    def chain(x: jax.Array, weights: list[Any]) -> jax.Array:
        for i in range(CALLS):
            out = product(x, weights[i % len(weights)]).reshape(len(x), -1)
            x = x + out[:, :1] * jnp.asarray(1e-6, x.dtype)
        return x

    return seconds(jax.jit(chain), x, weights) / CALLS
