"""The values by which a request is routed before it is tokenized."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from jaxserve.core.errors import CheckpointError, MissingExtraError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.fleet.replica import ReplicaCall, make_call

pytestmark = pytest.mark.fast


def _call(prompt: object) -> ReplicaCall:
    return make_call("a", prompt, SamplingParams(), priority=0, page_size=4)


def test_turns_of_a_conversation_share_pages():
    """A later turn begins with all full pages of the previous turn."""
    first = [{"role": "user", "content": "What is the capital of France, and why?"}]
    later = [*first, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "So?"}]
    pages = _call(first).pages
    assert len(pages) == 2
    assert _call(later).pages[: len(pages)] == pages


def test_tokens_are_counted_and_texts_guessed():
    """A page holds its size in token ids, or four times as many characters."""
    for prompt in (range(9), np.arange(9), (i for i in range(9)), [np.int64(i) for i in range(9)]):
        made = _call(prompt)
        assert (made.prompt, made.num_prompt_tokens, len(made.pages)) == (list(range(9)), 9, 2)
        assert {type(item) for item in made.prompt} == {int}
    made = _call("a" * 35)
    assert (made.num_prompt_tokens, len(made.pages)) == (9, 2)


@pytest.mark.parametrize("prompt", [None, 3.5, "", [], {"role": "user"}, ["a", 1], [1.5], [True]])
def test_what_is_no_prompt_is_passed_on(prompt):
    """It is sent unchanged, and the replica checks it."""
    made = _call(prompt)
    assert made.prompt == prompt and type(made.prompt) is type(prompt)
    assert made.pages == [] and made.num_prompt_tokens in (0, 1)


@pytest.mark.parametrize(
    "error", [CheckpointError("x", ["a", "b"], "mend it"), MissingExtraError("ray", "fleet", "it")]
)
def test_errors_travel_between_processes(error):
    """Errors with their own arguments arrive unchanged."""
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
