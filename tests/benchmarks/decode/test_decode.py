"""Decode steps are timed while all sequences decode; batches that do not fit are reported."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from benchmarks.common.harness import whole_numbers
from benchmarks.common.roofline import Machine
from benchmarks.common.shapes import hf_config
from benchmarks.decode.__main__ import main
from benchmarks.decode.batches import Batches
from jaxserve import Runtime
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.testing.tiny import OPTIONS, tiny_llama

pytestmark = pytest.mark.release

MACHINE = Machine(flops_per_s=1e12, bytes_per_s=1e11)
LENGTHS = dict(prompt_tokens=20, output_tokens=12)


def test_a_batch_is_timed_as_a_whole_and_by_the_step():
    """The batch is answered once before, so that nothing compiles while it is timed."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        first = Batches(rt, MACHINE, jnp.float32, **LENGTHS).measure(4)
        compiled = rt.stats().num_compilations
        again = Batches(rt, MACHINE, jnp.float32, **LENGTHS).measure(4)
        assert rt.stats().num_compilations == compiled
    for found in (first, again):
        assert found["output_tokens_per_s"] == pytest.approx(4 * 12 / found["wall_s"])
        assert 0 < found["decode_step_s"] < found["wall_s"]
        assert found["of_bound"] == pytest.approx(found["bound_step_s"] / found["decode_step_s"])
        assert 0 <= found["host_gap_share"] <= 1


def test_a_batch_without_memory_is_not_run():
    """The result has the memory that the batch would need."""
    page_bytes = 2 * 2 * 2 * 8 * 8 * 4
    with Runtime(tiny_llama(), **OPTIONS, kv_memory=10 * page_bytes) as rt:
        found = Batches(rt, MACHINE, jnp.float32, **LENGTHS).measure(4)
        assert rt.stats().num_steps == 0
    assert set(found) == {"batch_size", "does_not_fit"}


def test_shapes_are_configurations_of_llama():
    """The configuration has the requested number of layers."""
    config = LlamaConfig.from_hf(hf_config("llama-3-8b", 3))
    assert (config.num_layers, config.hidden_size, config.num_kv_heads) == (3, 4096, 8)
    assert hf_config("llama-2-13b")["num_hidden_layers"] == 40


@pytest.mark.parametrize("batches", ["", "0", "1,x"])
def test_batches_are_whole_numbers(batches):
    """The error shows what was given."""
    with pytest.raises(InvalidConfigError, match="--batches"):
        whole_numbers(batches, "--batches")


def test_prompts_without_a_length_are_refused(capsys):
    """The prompts are refused before a model is made."""
    assert main(["--prefill", "4096"]) == 2
    assert "--prefill '4096': pass whole numbers, as 8x4096" in capsys.readouterr().err
