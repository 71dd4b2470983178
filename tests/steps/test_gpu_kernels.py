"""On a GPU the engine uses our kernels, checked by lowering for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.execution.pages import PAGES_A_CALL, gathered, scattered
from jaxserve.kernels import dispatch
from jaxserve.kernels.cross import targeting
from jaxserve.models.batch import IncomingPages, empty_cache
from jaxserve.steps import slots as edits
from jaxserve.steps.packing import pack_rows, pack_window
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.slots import MOVES_A_CALL, empty_slots
from jaxserve.steps.step_function import Placement
from jaxserve.testing.tiny import MAX_CONTEXT, tiny_llama
from tests.common.tiers import some

CONFIG = EngineConfig(num_pages=50, max_slots=8, max_context=MAX_CONTEXT, max_step_tokens=64)
ATTENTION = {f"paged_attention_{kind}" for kind in ("tile", "split", "merge")}


def _kernels(function: Callable[..., Any], *arguments: Any, **static: Any) -> set[str]:
    """Return the names of the kernels in the code compiled for a GPU."""
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    text = jitted.trace(*arguments, **static).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r'name = "(\w+)"', text))


@pytest.mark.release
@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
def test_steps(layout):
    """Mixed steps and decode loops rotate, write and attend in kernels, as reported."""
    model = tiny_llama(layer_layout=layout)
    graphdef, params = nnx.split(model)
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    cache = jax.eval_shape(lambda: empty_cache(model.config, 50, 32, jnp.float32, layout))
    slots = jax.eval_shape(lambda: empty_slots(CONFIG))
    with targeting():
        programs = Programs(graphdef, CONFIG, model.config, place)
        batch, _ = pack_rows(CONFIG, (), CONFIG.max_step_tokens)
        mixed = _kernels(
            programs.mixed_body, params, cache, slots, batch, programs.plan_mixed(batch)
        )
        window = range(CONFIG.max_slots)
        decode = _kernels(
            programs.decode_loop,
            params,
            cache,
            slots,
            pack_window(window, ()),
            programs.plan_loop((), window),
            None,
            variant=Variant.FULL,
        )
        values = jax.eval_shape(gathered, cache, np.zeros(8, np.int32))
        incoming = IncomingPages(np.zeros(8, np.int32), values)
        bringing = _kernels(
            programs.mixed_body,
            params,
            cache,
            slots,
            batch,
            programs.plan_mixed(batch),
            None,
            incoming,
        )
    assert mixed == {"rotate_and_write"} | ATTENTION
    assert bringing == mixed | {"copy_pages"}
    assert decode == mixed - {"paged_attention_tile"} | {"row_maximum", "log_sum_exp"}
    _check_served("rotate_and_write")


@pytest.mark.release
def test_a_loop_that_speculates():
    """Its iterations with proposals attend for rows of several tokens too."""
    config, model = replace(CONFIG, num_proposed=8), tiny_llama()
    graphdef, params = nnx.split(model)
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    cache = jax.eval_shape(lambda: empty_cache(model.config, 50, 32, jnp.float32, "unrolled"))
    slots = jax.eval_shape(lambda: empty_slots(config))
    with targeting():
        programs = Programs(graphdef, config, model.config, place)
        window = range(4)
        found = _kernels(
            programs.decode_loop,
            params,
            cache,
            slots,
            pack_window(window, ()),
            programs.plan_loop((), window, num_proposed=4),
            None,
            variant=Variant.GREEDY,
            num_proposed=4,
        )
    assert found == {"rotate_and_write", "row_maximum"} | ATTENTION


@pytest.mark.release
def test_copies_of_pages_and_moves_of_slots():
    """Swaps, resizes and compaction of slots are copies by a kernel."""
    model = tiny_llama()
    cache = jax.eval_shape(lambda: empty_cache(model.config, 50, 32, jnp.float32, "unrolled"))
    ids = np.zeros(PAGES_A_CALL, np.int32)
    values = jax.eval_shape(gathered, cache, ids)
    places = np.zeros((2, MOVES_A_CALL), np.int32)
    with targeting():
        assert _kernels(gathered, cache, ids) == {"copy_pages"}
        assert _kernels(gathered, cache.k_pages[0], np.zeros(70, np.int32)) == {"copy_pages"}
        assert _kernels(scattered, cache, ids, values) == {"copy_pages"}
        slots = jax.eval_shape(lambda: empty_slots(CONFIG))
        assert _kernels(edits.move, slots, *places) == {"copy_pages"}
    for operation in ("gather_pages", "scatter_pages", "move_pages"):
        _check_served(operation)


def _check_served(operation: str) -> None:
    """Check that a report would name the kernel."""
    assert any(
        (choice.operation, choice.implementation, choice.platform) == (operation, "triton", "cuda")
        for choice in dispatch.choices()
    )
