"""What requests hold of their parameters and of the model's end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jaxserve.core.errors import InvalidRequestError, InvalidSamplingParamsError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.engine.requests import RequestBuilder
from jaxserve.steps.sampling.sampler import pack_sampling

pytestmark = pytest.mark.fast


def _built(
    params: SamplingParams, ends: Sequence[int] = (2, 5), prompt: Any = (1, 2, 3)
) -> Request:
    builder = RequestBuilder(
        None, eos_token_ids=ends, vocab_size=97, max_prompt_tokens=lambda: 90, seed=0
    )
    return builder.build(prompt, params, 0.0)


def test_a_message_without_content_is_refused():
    """As over HTTP (tests/server/test_errors.py), and before a template writes "None"."""
    with pytest.raises(InvalidRequestError, match="message 0 has no content"):
        _built(SamplingParams(), prompt=[{"role": "user"}])


@pytest.mark.parametrize(
    ("asked", "stops", "forbidden"),
    [
        ({}, (2, 5), ()),
        ({"ignore_eos": True}, (), ()),
        ({"min_tokens": 4}, (2, 5), (2, 5)),
        ({"min_tokens": 4, "ignore_eos": True}, (), (2, 5)),
        ({"min_tokens": 4, "stop_token_ids": (7, 2)}, (7, 2, 5), (7, 2, 5)),
        ({"min_tokens": 4, "stop_token_ids": (7,), "ignore_eos": True}, (7,), (7, 2, 5)),
    ],
)
def test_min_tokens_forbids_end_tokens_that_are_ignored(asked, stops, forbidden):
    """`ignore_eos` changes what ends an answer, not what may come before `min_tokens`.

    As in vLLM 0.32: `MinTokensLogitsProcessor` takes `all_stop_token_ids`, to which
    `update_from_generation_config` adds the model's own whatever `ignore_eos` says.
    """
    request = _built(SamplingParams(**asked))
    assert request.stop_token_ids == stops
    ids = pack_sampling([(request, 0)], 1).processors["min_tokens"]["ids"]
    assert ids[0, ids[0] >= 0].tolist() == list(forbidden)


def test_the_limit_of_stop_tokens_counts_what_min_tokens_forbids():
    """End tokens that are ignored take room where they are forbidden, and none elsewhere."""
    many = {"stop_token_ids": tuple(range(10, 10 + MAX_STOP_TOKEN_IDS)), "ignore_eos": True}
    assert len(_built(SamplingParams(**many)).stop_token_ids) == MAX_STOP_TOKEN_IDS
    with pytest.raises(InvalidSamplingParamsError, match="18 stop tokens with the model's own 2"):
        _built(SamplingParams(**many, min_tokens=1))
