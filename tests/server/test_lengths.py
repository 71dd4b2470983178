"""Predicted lengths over HTTP: in comments of streams, and in whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.common.tiers import some
from tests.server.serving import CHAT, Even, client, metrics, post, runtime, server

CHATS = {"messages": CHAT}
# The endpoints that stream, each with a body.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHATS, "max_tokens": 30},
    "/v1/completions": {"prompt": "a", "max_tokens": 30},
    "/v1/responses": {"input": "a", "max_output_tokens": 30},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 30}},
    "turn": {**CHATS, "max_tokens": 30, "conversation_id": "c"},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with runtime(predictor=Even(40), step_s=0.03, max_decode_iterations=1) as rt, server(rt) as url:
        yield url


def _comments(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[2:]) for line in text.splitlines() if line.startswith(": {")]


@pytest.mark.parametrize("name", some(ASKED))
def test_streams_say_how_long_they_will_be(url: str, name: str):
    """The first comment is the prediction; later ones are narrower. All say when the end comes."""
    path = "/v1/chat/completions" if name == "turn" else name
    post(url, "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True})  # has a pace
    text = post(url, path, {**ASKED[name], "stream": True}).text
    first, *others = _comments(text)
    assert 0.02 * 21 < first.pop("ends_in_s") < 21
    assert first == {
        "index": 0,
        "predicted_tokens": 21,
        "percentiles": [4, 10, 20, 30, 30],
        "num_tokens": 0,
    }
    if name != "/v1/responses":  # its stream begins with the response
        assert text.startswith(": {")
    assert others
    before = first
    for later in others:
        assert before["num_tokens"] < later["num_tokens"] < later["percentiles"][0] + 1
        assert later["percentiles"][0] > before["percentiles"][0]
        assert later["predicted_tokens"] >= before["predicted_tokens"]
        # Between the fastest and a slow pace of the tokens that are expected to come.
        num_left = later["predicted_tokens"] - later["num_tokens"]
        assert 0.02 * (num_left - 1) < later["ends_in_s"] < num_left
        before = later


@pytest.mark.release
@pytest.mark.parametrize("name", some(ASKED))
def test_whole_answers_have_the_prediction(url: str, name: str):
    """`predicted_tokens` is the mean, or the limit of the answer if that is less."""
    path = "/v1/chat/completions" if name == "turn" else name
    told = post(url, path, ASKED[name]).json()
    told = told["choices"][0] if path == "/v1/completions" else told
    assert told["predicted_tokens"] == 21


@pytest.mark.release
@pytest.mark.parametrize("stream", some([True, False]))
@pytest.mark.parametrize("name", ["/v1/completions", "turn"])
def test_real_lengths_are_compared_with_predicted_ones(url: str, name: str, stream: bool):
    """Answers of 30 tokens outgrow the length that half may outgrow, and no further one."""
    path = "/v1/chat/completions" if name == "turn" else name
    before = metrics(url)
    own = {"conversation_id": f"own {stream}"} if name == "turn" else {}
    post(url, path, {**ASKED[name], **own, "stream": stream})
    now = metrics(url)
    changed = {each: value - before[each] for each, value in now.items()}
    for what, change in (
        ("request_predicted_tokens_count", 1),
        ("request_predicted_tokens_sum", 20.5),
        ("request_prediction_error_tokens_sum", 9.5),
        ("request_outgrown_total['0.5']", 1),
        ("request_outgrown_total['0.1']", 0),
        ("request_outgrown_total['0.01']", 0),
        ("inter_token_latency_seconds_count", 29),
    ):
        assert changed[f"jaxserve:{what}"] == change, what


def test_the_first_stream_of_all_has_no_pace():
    """Nothing is known of when its answer ends; what is known of its length comes first."""
    with runtime(predictor=Even(40)) as rt, server(rt) as url:
        text = post(url, "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True}).text
        assert "ends_in_s" not in _comments(text)[0]


@pytest.mark.release
def test_the_last_event_of_a_response_has_the_prediction(url: str):
    body = {**ASKED["/v1/responses"], "stream": True}
    last = post(url, "/v1/responses", body).text.rstrip().splitlines()[-1]
    told = json.loads(last.removeprefix("data: "))
    assert told["type"] == "response.incomplete"
    assert told["response"]["predicted_tokens"] == 21


def test_choices_have_their_own_comments(url: str):
    """Each sample of each prompt has its number, and at most its limit."""
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True}
    comments = _comments(post(url, "/v1/completions", body).text)
    assert {each["index"]: each["predicted_tokens"] for each in comments} == dict.fromkeys(
        range(4), 3
    )


def test_official_clients_skip_comments(url: str):
    with client(url) as ai:
        stream = ai.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=3, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = post(url, "/v1/chat/completions", {**CHATS, "max_tokens": 3, "temperature": 0})
    assert text == whole.json()["choices"][0]["message"]["content"]


def test_servers_without_a_predictor_say_nothing():
    with runtime() as rt, server(rt) as url:
        body = {"prompt": "a", "max_tokens": 3}
        assert _comments(post(url, "/v1/completions", {**body, "stream": True}).text) == []
        assert "predicted_tokens" not in post(url, "/v1/completions", body).text
