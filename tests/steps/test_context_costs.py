"""What a step costs does not follow the longest context that there may be.

Counted in bytes that compiled programs read and write, and in bytes that calls transfer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import empty_cache
from jaxserve.scheduling.plan import Admission
from jaxserve.steps.packing import pack_rows, pack_window
from jaxserve.steps.programs import Programs
from jaxserve.steps.sampling.processors import Penalties, Rows
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.slots import admissions_by_call, admit, empty_slots, pack_admissions, pack_edits
from jaxserve.steps.step_function import OneBuffer, Placement, packed
from jaxserve.testing.tiny import tiny_llama
from tests.steps.sampling import request

SLOTS = 8
SHORT, LONG = 1024, 65_536


def _config(max_context: int) -> EngineConfig:
    return EngineConfig(
        num_pages=9, max_slots=SLOTS, max_context=max_context, max_step_tokens=64, page_size=32
    )


def _compiled(what: str, num_rows: int) -> str:
    """Return the compiled program of a step of some of the slots."""
    config, model = _config(LONG), tiny_llama()
    graphdef, params = nnx.split(model)
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    programs = Programs(graphdef, replace(config, attention="xla"), model.config, place)
    cache = jax.eval_shape(lambda: empty_cache(model.config, 9, 32, jnp.float32, "unrolled"))
    slots = jax.eval_shape(lambda: empty_slots(config))
    if what == "head":
        hidden = jax.ShapeDtypeStruct((SLOTS, 32), jnp.float32)
        index = np.zeros(num_rows, np.int32)
        traced = programs.mixed_head.trace(
            params, slots, hidden, index, None, None, variant=Variant.FULL
        )
    else:
        window = pack_window(range(num_rows), ())
        plan = programs.plan_loop((), range(num_rows))
        traced = programs.decode_loop.trace(
            params, cache, slots, window, plan, None, variant=Variant.FULL
        )
    return traced.lower().compile().as_text()


@pytest.mark.release
@pytest.mark.parametrize("what", ["head", "decode loop"])
def test_a_step_copies_no_table_of_tokens(what: str):
    """Penalties, heads and loops read and append to the table of all slots where it is."""
    text = _compiled(what, num_rows=4)
    table = f"s32[{SLOTS},{LONG}]"
    assert table in text
    assert f"s32[4,{LONG}]" not in text, "the rows' part of the table is copied"
    copies = [line for line in text.splitlines() if f"= {table}" in line and " copy(" in line]
    assert not copies, copies


def test_penalties_read_the_text_and_not_the_context():
    """The pieces that are read are those of the longest row that needs it."""
    config = _config(LONG)

    def head(slots: Any) -> Any:
        rows = Rows(slots.tokens, jnp.arange(SLOTS), slots.length, slots.sampling.prompt_length)
        arrays = slots.sampling.processors["penalties"]
        return Penalties().apply(jnp.zeros((SLOTS, 97)), arrays, rows)

    text = jax.jit(head).lower(jax.eval_shape(lambda: empty_slots(config))).as_text()
    assert f"{SLOTS}x{LONG}" in text  # the table is there
    widest = f"tensor<{SLOTS}x{LONG}xi1>", f"tensor<{SLOTS}x{LONG}xf32>"
    assert not any(each in text for each in widest), "a mask or a count as wide as the context"


@pytest.mark.release
def test_admissions_bring_their_own_tokens():
    """Two short prompts take the smallest compiled size, not four rows of the context."""
    config = _config(LONG)
    admissions = [
        Admission(slot, request(seed=slot), 0, np.arange(1 + slot, 40, dtype=np.int32), LONG)
        for slot in (5, 2)
    ]
    admitted, tokens = pack_admissions(config, admissions)
    assert tokens.nbytes == 4 * config.admission_buckets[0] == 4 * 256
    slots = jax.jit(admit)(empty_slots(config), admitted, tokens)
    for each in admissions:
        num = len(each.tokens)
        np.testing.assert_array_equal(slots.tokens[each.slot, :num], each.tokens)
        assert slots.length[each.slot] == num and not slots.done[each.slot]
    assert slots.done.sum() == SLOTS - 2 and not slots.tokens[0].any()


def test_admissions_are_shared_out_among_calls():
    """A call takes four at most, and together no more tokens than the context has."""
    config = _config(SHORT)
    lengths = [100, 1000, 24, 1024, 1, 1, 1, 1, 1]
    admissions = [
        Admission(slot % SLOTS, request(), 0, np.ones(length, np.int32), SHORT)
        for slot, length in enumerate(lengths)
    ]
    calls = list(admissions_by_call(config, admissions))
    assert [len(each.tokens) for call in calls for each in call] == lengths
    assert [len(call) for call in calls] == [1, 2, 1, 4, 1]
    for call in calls:
        pack_admissions(config, call)


def test_small_arrays_travel_in_one_buffer():
    """A mixed step, a loop, an admission and an edit take one or two arrays each."""
    config = _config(SHORT)
    admitted, tokens = pack_admissions(config, ())
    arguments = {
        "mixed": (pack_rows(config, ())[0],),
        "decode": (pack_window(range(SLOTS), ()),),
        "admit": (admitted, tokens),
        "edit": (pack_edits(config, (1, 3), [(1, 2, 3)]),),
    }
    for name, given in arguments.items():
        passed = tuple(map(packed, given))
        assert len(jax.tree.leaves(passed)) == len(given), name
        for one, other in zip(given, passed, strict=True):
            if isinstance(other, OneBuffer):
                back = jax.jit(lambda buffer: buffer.tree())(other)
                assert jax.tree.structure(back) == jax.tree.structure(one)
                for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(one), strict=True):
                    assert x.dtype == y.dtype
                    np.testing.assert_array_equal(x, y)


def test_a_buffer_takes_words_alone():
    """Numbers of another size would change their meaning."""
    with pytest.raises(TypeError, match="float16"):
        OneBuffer.of((np.zeros(3, np.float16), np.zeros(3, np.int32)))
