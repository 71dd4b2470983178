"""`/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/classify`, over HTTP and by OpenAI's client."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from flax import nnx

from jaxserve import Runtime
from jaxserve.models.pooling import Labels, Pooling
from jaxserve.testing import OPTIONS, letter_tokenizer, tiny_llama
from tests.server.serving import NAME, client, metrics, post, server

TEXTS = ["hello", "a longer text that takes several steps of this engine", "x"]


@pytest.fixture(scope="module")
def ranker():
    """The runtime of a tiny model with one label, and its address."""
    plain = tiny_llama()
    labels = Labels(names=("relevant",), activation="sigmoid")
    model = type(plain)(plain.config.without_token_head(labels), rngs=nnx.Rngs(3))
    with Runtime(model, tokenizer=letter_tokenizer(), **OPTIONS) as rt, server(rt) as url:
        yield rt, url


def _error(url: str, path: str, body: Any) -> dict[str, Any]:
    answer = post(url, path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_the_official_client_reads_embeddings(rt, url):
    """Its default is base64; one text or several, as texts or tokens."""
    wanted = rt.embed(TEXTS)
    embeddings = client(url).embeddings
    found = embeddings.create(model=NAME, input=TEXTS)
    np.testing.assert_allclose([each.embedding for each in found.data], wanted, atol=1e-6)
    assert [each.index for each in found.data] == [0, 1, 2] and found.model == NAME
    num_tokens = sum(map(len, TEXTS))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)
    tokens = [letter_tokenizer().encode(text) for text in TEXTS]
    for given, rows in [(TEXTS[1], [1]), (tokens[1], [1]), (tokens, [0, 1, 2])]:
        found = embeddings.create(model=NAME, input=given, encoding_format="float")
        np.testing.assert_allclose([e.embedding for e in found.data], wanted[rows], atol=1e-6)


def test_base64_is_float32(rt, url):
    """In little-endian order, as OpenAI sends it."""
    body = {"input": "hello", "encoding_format": "base64"}
    (data,) = post(url, "/v1/embeddings", body).json()["data"]
    found = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
    np.testing.assert_array_equal(found, rt.embed("hello"))


def test_requests_count(url):
    """Each text is a request of the metrics, without output."""
    before = metrics(url)
    post(url, "/v1/embeddings", {"input": TEXTS})
    after = metrics(url)
    name = "jaxserve:prompt_tokens_total"
    assert after[name] - before[name] == sum(map(len, TEXTS))
    assert after["jaxserve:generation_tokens_total"] == before["jaxserve:generation_tokens_total"]
    assert after["jaxserve:num_requests_waiting"] == after["jaxserve:num_requests_running"] == 0


@pytest.mark.parametrize(
    "body, code, said",
    [
        ({"input": ""}, None, "input"),
        ({"input": []}, None, "input"),
        ({"input": ["a", ""]}, None, "input"),
        ({"input": "a", "dimensions": 8}, None, "config.json"),
        ({"input": "a", "dimensions": 33}, None, "1 to 32"),
        ({"input": "a", "encoding_format": "int8"}, None, "encoding_format"),
        ({"input": [97]}, "token_out_of_range", "97"),
        ({"input": "a" * 129}, "context_length_exceeded", "129"),
        ({"input": ["a"] * 2049}, None, "input"),
        ({"input": {"a": 1}}, None, "input"),
    ],
)
def test_what_is_refused(url, body, code, said):
    error = _error(url, "/v1/embeddings", body)
    assert said in error["message"] and error["code"] == code


def test_a_model_that_may_be_cut():
    """Its config.json names the sizes."""
    model = tiny_llama()
    model.config = replace(model.config, pooling=Pooling(dimensions=(8, 16)))
    with Runtime(model, tokenizer=letter_tokenizer(), **OPTIONS) as rt, server(rt) as url:
        found = client(url).embeddings.create(model=NAME, input="ab", dimensions=8)
        np.testing.assert_allclose(found.data[0].embedding, rt.embed("ab", dimensions=8), atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="8, 16"):
            client(url).embeddings.create(model=NAME, input="ab", dimensions=4)


def test_documents_are_ranked(ranker):
    """Texts or objects; the answer has as many as are wanted."""
    rt, url = ranker
    documents = ["bcd", "xyz", "A B C"]
    wanted = rt.rerank("ab", documents)
    body = {"model": NAME, "query": "ab", "documents": [documents[0], {"text": "xyz"}, "A B C"]}
    answer = post(url, "/v1/rerank", body).json()
    assert [each["index"] for each in answer["results"]] == [each.index for each in wanted]
    assert [each["document"]["text"] for each in answer["results"]] == [
        each.document for each in wanted
    ]
    np.testing.assert_allclose(
        [each["relevance_score"] for each in answer["results"]],
        [each.relevance_score for each in wanted],
        atol=1e-6,
    )
    assert answer["usage"]["total_tokens"] == sum(len("ab" + each) for each in documents)
    short = post(url, "/v1/rerank", {**body, "top_n": 1, "return_documents": False}).json()
    assert [set(each) for each in short["results"]] == [{"index", "relevance_score"}]


def test_pairs_are_scored(ranker):
    """One text with each of several, or as many of both."""
    rt, url = ranker
    by_index = sorted(rt.rerank("ab", ["bcd", "xyz"]), key=lambda each: each.index)
    wanted = [each.relevance_score for each in by_index]
    for first in ("ab", ["ab", "ab"]):
        answer = post(url, "/v1/score", {"text_1": first, "text_2": ["bcd", "xyz"]}).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted, atol=1e-6)
    error = _error(url, "/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
    assert "text_1 has 2" in error["message"]


def test_labels(ranker):
    """A reward is the logit itself."""
    rt, url = ranker
    answer = post(url, "/classify", {"input": TEXTS}).json()
    assert {each["label"] for each in answer["data"]} == {"relevant"}
    found = [each["probs"] for each in answer["data"]]
    np.testing.assert_allclose(found, rt.classify(TEXTS).logits, atol=1e-6)


def test_other_models_refuse(url, ranker):
    _, ranking = ranker
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for where, path, body in [
        (url, "/v1/rerank", {"query": "a", "documents": ["b"]}),
        (url, "/classify", {"input": "a"}),
        (ranking, "/v1/embeddings", {"input": "a"}),
        (ranking, "/v1/completions", {"prompt": "a"}),
        (ranking, "/v1/chat/completions", chat),
    ]:
        error = _error(where, path, body)
        assert error["code"] == "other_task" and "call " in error["message"], path
