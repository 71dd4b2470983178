"""A tiny model behind the HTTP server, in this process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
from prometheus_client.parser import text_string_to_metric_families

from jaxserve import Runtime
from jaxserve.predictor import LengthBuckets, LengthDistributions
from jaxserve.server import ServerOptions, running
from jaxserve.testing import OPTIONS, SlowExecutor, letter_tokenizer, tiny_llama, write_chat_model

NAME = "tiny"
CHAT: Any = [{"role": "user", "content": "hi"}]


class Even:
    """A predictor to which every length up to `longest` is equally likely."""

    calibration = None

    def __init__(self, longest: int):
        self._buckets = LengthBuckets.equal_width(longest, 4)

    def predict(self, prompts: Any, /) -> LengthDistributions:
        return LengthDistributions(self._buckets, np.full((len(prompts), 4), 0.25))


@contextmanager
def runtime(*, step_s: float = 0.0, **options: Any) -> Iterator[Runtime]:
    """Yield a tiny model's runtime, whose steps take at least `step_s` seconds."""
    wrap = (lambda executor: SlowExecutor(executor, step_s)) if step_s else None
    given = {**OPTIONS, "tokenizer": letter_tokenizer(), **options}
    with Runtime(tiny_llama(), wrap_executor=wrap, **given) as rt:
        yield rt


@contextmanager
def server(rt: Runtime, *, traces: Any = None, **options: Any) -> Iterator[str]:
    """Serve a runtime, and yield the address."""
    given = {"model_name": NAME, "port": 0, "log_requests": False, **options}
    with running(rt, ServerOptions(**given), traces=traces) as url:
        yield url


@contextmanager
def chat_server(folder: Path, template: str) -> Iterator[str]:
    """Serve a chat model with random weights and this template, written into a new folder."""
    folder.mkdir()
    write_chat_model(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    options: Any = {"max_slots": 4, "max_step_tokens": 32, "page_size": 32, "max_context": 2048}
    with (
        Runtime.from_pretrained(str(folder), load="random", progress=False, **options) as rt,
        server(rt) as url,
    ):
        yield url


def client(url: str, key: str = "none") -> openai.OpenAI:
    """Return the official client, which does not retry."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def post(url: str, path: str, body: Any, **headers: str) -> httpx2.Response:
    """Send a body: bytes as they are, and others as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers}
    return httpx2.post(url + path, content=content, headers=sent, timeout=60)


def metrics(url: str) -> dict[str, float]:
    """Return the values of all metrics; those with labels of their own have them in the name."""
    text = httpx2.get(url + "/metrics", timeout=60).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + ("" if not own else str(sorted(own.values())))] = sample.value
    return found


def num_open(url: str) -> float:
    """Return how many requests run or wait."""
    found = metrics(url)
    return sum(found[name] for name in found if name.startswith("jaxserve:num_requests_"))


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """Return a plain connection to a server; `receive_buffer` bytes may wait to be read."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    return connection


def request_of(path: str, body: Any) -> bytes:
    """Return a request to post a body as JSON, whose connection is closed after the answer."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def events(text: str) -> list[dict[str, Any]]:
    """Return the data of a stream's events, without the last, which says that it is complete."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
