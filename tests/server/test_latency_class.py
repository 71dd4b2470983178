"""Bounds of every kind over HTTP, and classes of them that a header chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server import ServerOptions, parse_latency_classes
from jaxserve.server.options import LatencyClass
from tests.common.tiers import some
from tests.server.serving import CHAT, NAME, metrics, post, runtime, server

CLASSES = {
    "chat": {"latency_bound": 1000.0, "first_token_bound": 1000.0},
    "hasty": {"token_bound": 1e-6},
}
ASKED: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
BODIES = {
    "/v1/completions": {**ASKED, "prompt": "a"},
    "/v1/chat/completions": {**ASKED, "messages": CHAT},
    "/v1/responses": {"max_output_tokens": 4, "temperature": 0, "input": "hi"},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": ASKED},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with runtime() as rt, server(rt, latency_classes=CLASSES) as address:
        yield address


def _kept(url: str, kind: str) -> float:
    return metrics(url)[f"jaxserve:latency_bounds_total{sorted([kind, 'kept'])}"]


@pytest.mark.parametrize("path", some(BODIES))
def test_a_header_gives_the_bounds_of_its_class(url: str, path: str):
    """Every endpoint that answers takes the header; both bounds of the class are counted."""
    before = _kept(url, "latency"), _kept(url, "first_token")
    assert post(url, path, BODIES[path], **{"x-latency-class": "chat"}).status_code == 200
    assert (_kept(url, "latency"), _kept(url, "first_token")) == (before[0] + 1, before[1] + 1)
    assert post(url, path, BODIES[path]).status_code == 200  # without it none is
    assert _kept(url, "latency") == before[0] + 1


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_class_is_refused(url: str, path: str):
    refused = post(url, path, BODIES[path], **{"x-latency-class": "other"})
    assert refused.status_code == 400
    assert "chat, hasty" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "x-latency-class"


@pytest.mark.parametrize("stream", [False, True])
def test_turns_that_are_refused_are_counted(url: str, stream: bool):
    """A turn that a bound refuses counts as an error and a refusal, and not as cancelled."""
    body = {**BODIES["/v1/chat/completions"], "conversation_id": f"counted {stream}"}
    assert post(url, "/v1/chat/completions", body).status_code == 200  # the engine knows its steps
    before = metrics(url)
    refused = post(url, "/v1/chat/completions", {**body, "latency_bound": 1e-6, "stream": stream})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "bound_not_met"
    after = metrics(url)
    for name, more in (
        (f"jaxserve:latency_bounds_total{['latency', 'refused']}", 1),
        (f"jaxserve:request_success_total{['error']}", 1),
        (f"jaxserve:request_success_total{['abort']}", 0),
    ):
        assert after[name] == before[name] + more, name


def test_the_schema_has_the_header(url: str):
    found = httpx2.get(url + "/openapi.json").json()["paths"]
    for path in BODIES:
        names = [each["name"] for each in found[path]["post"]["parameters"]]
        assert "x-latency-class" in names


def test_a_policy_that_heeds_no_bounds_refuses_them():
    """It is an error of that request alone, which names policies that do."""
    with runtime(policy="vllm_like") as rt, server(rt, latency_classes=CLASSES) as url:
        for bounds, headers in (
            ({"token_bound": 3.0}, {}),
            ({"first_token_bound": 3.0}, {}),
            ({}, {"x-latency-class": "chat"}),
        ):
            body = {**BODIES["/v1/completions"], **bounds}
            refused = post(url, "/v1/completions", body, **headers)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "unheeded_bound"
            assert "auto" in refused.json()["error"]["message"]
        assert post(url, "/v1/completions", BODIES["/v1/completions"]).status_code == 200


def test_the_tighter_bound_counts():
    own = LatencyClass({"latency_bound": 2.0, "token_bound": 0.5})
    for given, wanted in (
        ({}, {"latency_bound": 2.0, "token_bound": 0.5}),
        ({"latency_bound": 1.0}, {"latency_bound": 1.0, "token_bound": 0.5}),
        (
            {"latency_bound": 3.0, "first_token_bound": 1.0},
            {"latency_bound": 2.0, "first_token_bound": 1.0, "token_bound": 0.5},
        ),
    ):
        params = SamplingParams(max_tokens=7, **given)
        found = own.apply(params)
        assert found.bounds == wanted and found.max_tokens == 7
    assert LatencyClass({}).apply(params) == params


def test_texts_of_classes():
    """A name and seconds; what else is given is an error that shows the form."""
    found = parse_latency_classes(["chat=latency:2,first_token:0.5", "bulk=token:1"])
    assert found == {
        "chat": {"latency_bound": 2.0, "first_token_bound": 0.5},
        "bulk": {"token_bound": 1.0},
    }
    for wrong in ("chat", "chat=", "=latency:2", "a=speed:2", "a=latency:x", "a=token:1,token:2"):
        with pytest.raises(InvalidConfigError, match="chat=latency:2"):
            parse_latency_classes([wrong])
    with pytest.raises(InvalidConfigError, match="twice"):
        parse_latency_classes(["a=token:1", "a=token:2"])
    for wrong in ("a=latency:0", "a=latency:nan", "a=token:-1"):
        with pytest.raises(InvalidConfigError, match="latency class 'a'"):
            parse_latency_classes([wrong])


@pytest.mark.parametrize("bounds", [{}, {"latency": 2.0}, {"latency_bound": 0.0}])
def test_bounds_of_options_are_checked(bounds: Mapping[str, float]):
    with pytest.raises(InvalidConfigError, match="latency class 'a'"):
        ServerOptions(model_name=NAME, latency_classes={"a": bounds})
