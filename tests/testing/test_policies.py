"""`check_policy` passes correct policies, and finds each kind of error."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import check_policy

ROOT = Path(__file__).parents[2]


@pytest.mark.release
def test_a_policy_that_keeps_pages_is_checked_with_conversations():
    """A policy can be a name or an object; the counts show that pages were evicted and hit."""
    checked = check_policy("pensieve", num_traces=6)
    assert checked == check_policy(PRESETS["pensieve"], num_traces=6)
    assert checked.num_traces == 6 and checked.num_preemptions > 0 and checked.num_prefix_hit > 0
    assert checked.num_tokens > checked.num_requests > 6
    other = check_policy("pensieve", num_traces=6, first_seed=6)
    assert other.num_requests != checked.num_requests
    assert check_policy("vllm_like", num_traces=3).num_prefix_hit == 0


@dataclass(frozen=True)
class Idle:
    """An iteration shape that lets nothing run."""

    num_device_groups = 1
    makes_way = False
    reserved_slots = 0

    def new_state(self) -> None:
        return None

    def select(self, step, state: None) -> None:
        step.wait_until(step.now_s + 1e-3)


def test_a_policy_that_lets_nothing_run_is_found():
    """The message has the seed."""
    policy = replace(PRESETS["vllm_like"], name="idle", iteration=Idle())
    with pytest.raises(AssertionError, match="seed 0: the policy waits without end"):
        check_policy(policy, num_traces=3)


@dataclass(frozen=True)
class Meddling:
    """An iteration shape that changes earlier tokens."""

    num_device_groups = 1
    makes_way = False
    reserved_slots = 0

    def new_state(self) -> None:
        return None

    def select(self, step, state: None) -> None:
        PRESETS["vllm_like"].iteration.select(step, state)
        for sequence in step.running:
            if len(sequence.output) > 3:
                sequence.output[-1] += 1


def test_a_policy_that_changes_tokens_is_found():
    """The message has both sequences of tokens."""
    policy = replace(PRESETS["vllm_like"], name="meddling", iteration=Meddling())
    with pytest.raises(AssertionError, match=r"seed \d+: sample 0 .* under meddling, and Outcome"):
        check_policy(policy, num_traces=3)


def test_an_unknown_preset_is_refused():
    """The error lists the existing names."""
    with pytest.raises(InvalidConfigError, match="vllm_like"):
        check_policy("no such policy")


def test_policies_are_checked_without_jax():
    """No other slow import happens either."""
    program = (
        "import sys; from jaxserve.testing import check_policy\n"
        "check_policy('auto', num_traces=1)\n"
        "sys.exit(', '.join({'jax', 'torch', 'pytest', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.release
def test_the_documentation_runs():
    """Each program of the page runs by itself, as printed."""
    text = (ROOT / "docs" / "testing.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 3
    for program in programs:
        exec(compile(program, "docs/testing.md", "exec"), {"__name__": "__main__"})
