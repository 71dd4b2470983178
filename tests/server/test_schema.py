"""The published schema, and random requests that follow it or do not."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jaxserve.server import ServerOptions
from jaxserve.server.app import make_app
from jaxserve.server.backend import Backend
from tests.common.tiers import examples
from tests.server.serving import NAME, post, runtime, server

SCHEMA = schemathesis.openapi.from_dict(make_app(Backend(ServerOptions(model_name=NAME))).openapi())
# The values at the edges of every field, which take seconds to list at each collection.
SCHEMA.config.phases.coverage.enabled = settings.get_current_profile_name() == "release"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with runtime() as rt, server(rt, request_timeout_s=20) as url:
        yield url


def test_schema_is_published(url: str):
    """`/openapi.json` has the endpoints, their fields, and errors in OpenAI's format."""
    schema = httpx2.get(url + "/openapi.json").json()
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics")
    assert set(paths) <= set(schema["paths"])
    chat = schema["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert {"temperature", "top_k", "max_completion_tokens", "stop"} <= set(chat["properties"])
    text, texts, _ = chat["properties"]["stop"]["anyOf"]
    assert text["maxLength"] == texts["items"]["maxLength"] == 256 and texts["maxItems"] == 64
    answers = schema["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in answers and "501" in answers
    for path, methods in schema["paths"].items():
        for method, told in methods.items():
            assert "421" in told["responses"], (method, path)  # other hosts are refused everywhere
    event = answers["200"]["content"]["text/event-stream"]["itemSchema"]
    assert event["properties"].keys() == {"event", "data"}


def test_the_page_of_endpoints_loads_nothing():
    """`/docs` has each endpoint and the fields of bodies, without scripts and without a key."""
    app = make_app(Backend(ServerOptions(model_name=NAME, api_keys=("key",))))
    answer = TestClient(app, base_url="http://localhost").get("/docs")
    assert answer.status_code == 200 and "text/html" in answer.headers["content-type"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert all(f" {path}</code>" in answer.text for path in app.openapi()["paths"])
    assert "<code>max_completion_tokens</code><td>integer" in answer.text
    assert "<code>audio</code>" not in answer.text  # it may only be null
    assert "src=" not in answer.text and "<script" not in answer.text


@SCHEMA.parametrize()
@settings(examples(5, 25), database=None, suppress_health_check=list(HealthCheck))
def test_random_requests(url: str, case: schemathesis.Case):
    """No request makes the server fail, and every answer is one that the schema says."""
    response = case.call(base_url=url, timeout=60)
    case.validate_response(
        response,
        checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
    )
    # Only a bound on the latency that is too tight may be refused with a 5xx, as documented.
    assert response.status_code < 500 or response.json()["error"]["code"] == "bound_not_met"


def test_server_goes_on(url: str):
    assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
