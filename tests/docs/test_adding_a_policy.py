"""The worked examples of docs/adding_a_policy.md, built from the blocks of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, package_with, run_with

# Runs in a separate process, where `jaxserve` is the changed copy.
PROGRAM = """
import sys
import jaxserve
from jaxserve import Request, Runtime, SamplingParams
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import get_policy
from jaxserve.testing import check_policy
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama

assert jaxserve.__file__.startswith(sys.argv[1]), jaxserve.__file__
CONFIG = EngineConfig(page_size=4, num_pages=99, max_slots=2, max_context=60, max_step_tokens=64)
PARAMS = SamplingParams(max_tokens=12)


def first_tokens(policy, *lengths):
    # The prompts' lengths in the order of their first tokens; each was submitted a step after the
    # one before it.
    executor = SimulatedExecutor(CONFIG, VirtualClock())
    engine, sequences, order = Engine(executor, get_policy(policy), VirtualClock()), [], []
    waiting = list(lengths)
    while waiting or engine.has_work:
        if waiting:
            length = waiting.pop(0)
            request = Request(id=str(length), prompt=(1,) * length, params=PARAMS, arrival_s=0.0)
            sequences += engine.add(request)
        engine.step()
        for sequence in sequences:
            if sequence.output and sequence.prompt_length not in order:
                order.append(sequence.prompt_length)
    return order


lengths = 9, 10, 30, 20, 5
assert first_tokens("vllm_like", *lengths) == [9, 10, 30, 20, 5]
assert first_tokens("short_first", *lengths) == [9, 10, 5, 20, 30]
for policy in ("short_first", "now_and_then"):
    checked = check_policy(policy, num_traces=60)
    assert checked.num_requests > 300, checked
prompts = random_prompts(6)
answers = []
for policy in ("vllm_like", "short_first", "now_and_then"):
    with Runtime(tiny_llama(), policy=policy, **OPTIONS | {"strict": True, "warmup": True}) as rt:
        answers.append([each.token_ids for each in rt.generate(prompts, PARAMS)])
        answers[-1].append(rt.stats().num_compilations)
assert answers[0] == answers[1] == answers[2] and answers[0][-1] == 0, answers
print("served")
"""


def test_each_example_touches_one_file_beside_its_own():
    """Each example adds one new file and a line to the list of presets."""
    found = blocks("adding_a_policy.md")
    assert [block.kind for block in found] == ["python", "diff"] * 2
    assert {block.path for block in found[1::2]} == {"jaxserve/scheduling/presets.py"}
    assert len({block.path for block in found}) == 3


@pytest.mark.release
def test_the_examples_serve(tmp_path: Path):
    """They decide as the page says, keep the invariants, and serve by their names."""
    package = package_with("adding_a_policy.md", tmp_path)
    assert run_with(package, PROGRAM) == "served"
