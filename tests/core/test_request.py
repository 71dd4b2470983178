"""What requests and answers show of themselves, and the check of chat messages."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from jaxserve.core.errors import EmptyPromptError, InvalidRequestError
from jaxserve.core.request import Completion, Request, Sample, Timing, check_messages
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.pending import Pending

pytestmark = pytest.mark.fast


def test_reprs_are_short_and_tell():
    """A prompt is its length and its beginning, an answer its text; defaults are left out."""
    params = SamplingParams(temperature=0.5, stop="x")
    assert repr(params) == "SamplingParams(max_tokens=256, temperature=0.5, stop=('x',))"
    request = Request(id="a", prompt=tuple(range(9000)), params=params, arrival_s=0.0)
    assert repr(request) == f"Request('a', 9000 tokens (0, 1, 2, 3, 4, 5, ...), {params!r})"
    sample = Sample(text="word " * 1000, token_ids=(1,) * 1000, finish_reason="stop")
    timing = Timing(arrival_s=1.0, finished_s=1.25)
    answer = Completion(request_id="a", prompt_token_ids=(1, 2), samples=(sample,), timing=timing)
    assert "1000 tokens, 'stop'" in repr(sample) and len(repr(sample)) < 120
    assert repr(answer) == f"Completion('a', 2 prompt tokens, {sample!r}, 0.25 s)"
    assert repr(Pending.ended(answer)) == "Pending('a', ended)"
    assert repr(Pending("b", Future(), print)) == "Pending('b', running)"
    error = EmptyPromptError("no tokens")
    failed = Completion(
        request_id="b", prompt_token_ids=(), samples=(sample,), timing=timing, error=error
    )
    assert "0 prompt tokens, EmptyPromptError: no tokens" in repr(failed)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "message 1 has no content; pass {'role': 'user', 'content': text}"),
        ({"role": "tool", "content": None}, "message 1 has no content"),
        ({"content": "hi"}, "message 1 has the role None"),
        ({"role": 3, "content": "hi"}, "message 1 has the role 3"),
    ],
)
def test_a_message_needs_a_role_and_a_content(message, said):
    """The error names the message; an assistant's may have calls in place of a content."""
    check_messages([{"role": "user", "content": "hi"}, {"role": "assistant"}])
    with pytest.raises(InvalidRequestError) as raised:
        check_messages([{"role": "user", "content": "hi"}, message])
    assert said in str(raised.value)
