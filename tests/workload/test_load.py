"""The load of a measurement: what its client makes of streams, and the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.load import (
    StreamClient,
    TimedAnswer,
    send_all,
    summarise_answers,
    unanswered,
)
from tests.common.streams import DONE, event, streaming, text
from tests.common.tiers import some

pytestmark = pytest.mark.fast


def _answered(parts: Sequence[bytes], status: int = 200) -> TimedAnswer:
    (answer,) = answers = unanswered(1)
    with streaming(lambda _: (status, parts)) as url:
        client = StreamClient(f"{url}/v1/completions")
        asyncio.run(send_all(client.send, [b"{}"], [0.0], answers))
    return answer


@pytest.mark.release
def test_events_are_read_however_they_are_cut():
    """Chunks end within events; the usage has the numbers of tokens."""
    usage = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 9})
    stream = text("one") + text("two", "stop") + usage + DONE
    whole, cut = (
        _answered([stream]),
        _answered([stream[i : i + 7] for i in range(0, len(stream), 7)]),
    )
    for answer in (whole, cut):
        assert (answer.error, answer.num_tokens, answer.num_prompt_tokens) == ("", 9, 3)
        assert 0 < answer.sent_s < answer.times_s[0] <= answer.times_s[1] < answer.end_s


def test_events_are_counted_without_a_usage():
    """Thoughts and calls are tokens too; an event with neither is not."""
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "a"}, {"content": "b"}]
    answer = _answered([event(choices=[{"delta": delta}]) for delta in deltas] + [DONE])
    assert (answer.error, answer.num_tokens, len(answer.times_s)) == ("", 2, 2)


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    some(
        [
            ([b'{"error": "no"}'], 400, 'status 400: {"error": "no"}'),
            ([text("one")], 200, "ended before the answer"),
            ([DONE], 200, "no text"),
            ([text("one"), event(error={"message": "out of memory"})], 200, "out of memory"),
            ([b"data: {broken\n\n"], 200, "JSONDecodeError"),
        ],
        0,
        2,
    ),
)
def test_what_is_no_answer_is_an_error(parts, status, said):
    """The error says what the server said; nothing is raised."""
    assert said in _answered(parts, status).error


def test_a_server_that_is_not_there_is_an_error():
    """A refused connection fails the request, and a bad address the client."""
    (answer,) = answers = unanswered(1)
    client = StreamClient("http://127.0.0.1:1/v1/completions")
    asyncio.run(send_all(client.send, [b"{}"], [0.0], answers))
    assert "ConnectionRefusedError" in answer.error and answer.end_s > 0
    for bad in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:port"):
        with pytest.raises(InvalidConfigError, match="is not understood"):
            StreamClient(bad)


def test_at_most_so_many_requests_are_open():
    """A request begins when another one ends; its start is then, not its planned time."""
    most, num_open = 0, 0

    async def send(_: int, answer: TimedAnswer) -> None:
        nonlocal most, num_open
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.01)
        num_open -= 1

    answers = unanswered(7)
    asyncio.run(send_all(send, range(7), [0.0] * 7, answers, max_concurrency=3))
    assert most == 3
    assert answers[-1].at_s > answers[0].at_s + 0.01
    assert all(0.01 <= answer.end_s < 1 for answer in answers)


def test_figures_of_answers():
    """Failed and unfinished answers are counted, and in no rate; the goodput keeps all bounds."""
    good = TimedAnswer([0.1, 0.2, 0.3], 5, 0.4, num_prompt_tokens=7)
    slow = TimedAnswer([0.5], 1, 0.6, num_prompt_tokens=3)
    failed = TimedAnswer([0.1], 1, 0.2, error="status 500")
    found = summarise_answers(
        [good, slow, failed, *unanswered(2)],
        2.0,
        percentiles=(50,),
        bounds_s={"ttft": 0.4, "tpot": 0.05, "e2el": 1.0},
    )
    assert (found["num_requests"], found["num_completed"]) == (5, 2)
    assert (found["num_failed"], found["num_unfinished"]) == (1, 2)
    assert (found["prompt_tokens"], found["output_tokens"]) == (10, 6)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 3.0)
    assert found["time_to_first_token_s"] == pytest.approx({"mean": 0.3, "p50": 0.3})
    assert found["time_per_output_token_s"] == pytest.approx({"mean": 0.05, "p50": 0.05})
    assert found["inter_token_latency_s"] == pytest.approx({"mean": 0.1, "p50": 0.1})
    assert found["errors"] == {"status 500": 1}
    assert found["goodput"]["share"] == pytest.approx(1 / 3)
    nothing = summarise_answers(unanswered(1), 1.0)
    assert nothing["latency_s"] is None and nothing["requests_per_s"] == 0
