"""Counters of the engine, against what it computed."""

from __future__ import annotations

from jaxserve import Runtime, SamplingParams
from jaxserve.engine.recorder import ITERATION_TOKENS
from jaxserve.testing import OPTIONS, tiny_llama


def test_iterations_by_tokens():
    """Each iteration is in the range of its tokens: a prompt's in one, and those of answers."""
    assert ITERATION_TOKENS[:3] == (1, 8, 16) and ITERATION_TOKENS[-1] == 16384
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        rt.generate(list(range(10)), SamplingParams(max_tokens=1, temperature=0.0))
        one = rt.stats()
        assert one.num_iterations_by_tokens == (0, 0, 1, *[0] * 11)
        rt.generate([1], SamplingParams(max_tokens=20, temperature=0.0))
        stats = rt.stats()
    assert stats.num_iterations_by_tokens[2:] == one.num_iterations_by_tokens[2:]
    assert sum(stats.num_iterations_by_tokens) == stats.num_iterations >= 20
    assert stats.num_iterations_by_tokens[0] == stats.num_iterations - 1
