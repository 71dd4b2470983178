"""The worked example of docs/adding_a_processor.md, built from the blocks of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, package_with, run_with

# A script for the copy. It runs in a separate process, in which `jaxserve` is the copy.
PROGRAM = """
import math
import sys
from dataclasses import replace
import jaxserve
from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama

assert jaxserve.__file__.startswith(sys.argv[1]), jaxserve.__file__
prompts = random_prompts(3)
hot = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
try:
    replace(hot, epsilon_cutoff=1.0)
except InvalidSamplingParamsError as error:
    assert "epsilon_cutoff=1.0" in str(error), error
else:
    raise AssertionError("a cutoff of 1 was accepted")
asked = [
    replace(hot, temperature=0.0),
    replace(hot, epsilon_cutoff=0.999),
    hot,
    replace(hot, epsilon_cutoff=1e-9),
    replace(hot, epsilon_cutoff=0.02),
]
with Runtime(tiny_llama(), **OPTIONS | {"strict": True, "warmup": True}) as rt:
    alone = [[rt.generate(p, params).token_ids for p in prompts] for params in asked]
    together = rt.generate(prompts * len(asked), [params for params in asked for _ in prompts])
    assert rt.stats().num_compilations == 0
greedy, cut_to_one, random, uncut, cut = alone
assert cut_to_one == greedy != random == uncut
assert cut not in (greedy, random)
with Runtime(tiny_llama(), **OPTIONS | {"strict": True, "warmup": True}) as rt:
    for completion in rt.generate(prompts, replace(asked[-1], logprobs=1)):
        for token in completion.logprobs:
            assert token.logprob > math.log(0.02) or token.token_id == token.top[0][0], token
assert [c.token_ids for c in together] == [tokens for answers in alone for tokens in answers]
print("served")
"""


def test_the_example_touches_two_files():
    """The page adds no file and changes two."""
    found = blocks("adding_a_processor.md")
    assert [block.kind for block in found] == ["diff", "diff"]
    assert len({block.path for block in found}) == 2


@pytest.mark.release
def test_the_example_serves(tmp_path: Path):
    """A runtime of the changed package validates the parameter, and drops the right tokens.

    Requests with it are served in one batch with others, without another compilation.
    """
    package = package_with("adding_a_processor.md", tmp_path)
    assert run_with(package, PROGRAM) == "served"
