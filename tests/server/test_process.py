"""`jaxserve serve` as a process: loading, SIGTERM under load, and what stops it from starting."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from jaxserve.cli import app
from jaxserve.cli import serve as serving
from jaxserve.testing import write_chat_model
from tests.common.processes import one_device_environment
from tests.common.waiting import until
from tests.server.serving import num_open, post, runtime, server


@contextmanager
def _started(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server, yield it and its address, and kill it if it still runs."""
    log = folder / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stderr=stderr,
            stdout=subprocess.DEVNULL,
            env=one_device_environment(),
        )
    try:
        end_s = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://\S+);", log.read_text())):
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.release
def test_sigterm_under_load(tmp_path: Path):
    """After SIGTERM accepted requests get their whole answers, and the process ends with 0."""
    with _started(tmp_path, "-m", "tests.server.job") as (process, url):
        _until_ready(url)
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 90}
        answers: list[httpx2.Response] = []

        def ask(number: int) -> None:
            stream = bool(number % 2)
            answers.append(post(url, "/v1/completions", {**body, "stream": stream}))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: num_open(url) == 8, 60)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200] * 8
        for answer in answers:
            assert "length" in answer.text and "error" not in answer.text
        assert process.wait(30) == 0


@pytest.mark.release
def test_second_signal_ends_at_once(tmp_path: Path):
    """The second signal waits for no queue of a minute, nor for a service that closes in one."""
    with _started(tmp_path, "-m", "tests.server.job", "late") as (process, url):
        _until_ready(url)
        body = {"prompt": ["a"] * 64, "max_tokens": 90}
        errors: list[Exception] = []

        def ask() -> None:
            try:
                post(url, "/v1/completions", body)
            except httpx2.TransportError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: num_open(url) == 64, 60)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(url + "/ready").status_code == 503, 60)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and time.monotonic() - begun_s < 20
        assert "64 go on" in (tmp_path / "stderr").read_text()
        asking.join(30)
        assert errors


@pytest.mark.release
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_while_closing(tmp_path: Path, sig: signal.Signals):
    """The second signal ends a server that has drained and waits for its service to close."""
    with _started(tmp_path, "-m", "tests.server.job", "late") as (process, url):
        _until_ready(url)
        process.send_signal(sig)
        end_s = time.monotonic() + 60
        with pytest.raises(httpx2.TransportError):
            while time.monotonic() < end_s:
                httpx2.get(url + "/health")
        time.sleep(0.3)  # the event loop is over, and the service closes for a minute
        assert process.poll() is None
        begun_s = time.monotonic()
        process.send_signal(sig)
        assert process.wait(30) == 0 and time.monotonic() - begun_s < 20
        assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.release
def test_turns_outlive_a_kill(tmp_path: Path):
    """After kill -9 in the middle of a turn, the turns whose answers clients had are there."""
    journal = tmp_path / "journal"
    asked: dict[str, Any] = {"conversation_id": "a/b", "temperature": 0}
    with _started(tmp_path, "-m", "tests.server.job", str(journal)) as (process, url):
        _until_ready(url)
        for number, stream in enumerate((False, True)):
            said = [{"role": "user", "content": f"hi {number}"}]
            body = {**asked, "messages": said, "max_tokens": 5, "stream": stream}
            assert post(url, "/v1/chat/completions", body).status_code == 200
        shown = httpx2.get(url + "/conversations/a%2Fb").json()["messages"]
        assert len(shown) == 4
        body = {**asked, "messages": said, "max_tokens": 60, "stream": True}
        with httpx2.stream("POST", url + "/v1/chat/completions", json=body) as cut:
            lines = cut.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx2.TransportError):
                list(lines)
        assert process.wait(30) == -9
    with runtime(conversations=journal) as rt, server(rt) as again:
        assert httpx2.get(again + "/conversations/a%2Fb").json()["messages"] == shown
        body = {**asked, "messages": said, "max_tokens": 5}
        assert post(again, "/v1/chat/completions", body).status_code == 200


def _until_ready(url: str) -> None:
    until(lambda: httpx2.get(url + "/ready", timeout=60).status_code == 200, 60)


@pytest.mark.release
@pytest.mark.parametrize("num_signals", [1, 2])
def test_signal_while_loading(tmp_path: Path, num_signals: int):
    """The command listens at once; a signal does not wait for a model that is being loaded."""
    model = write_chat_model(tmp_path)
    arguments = ("-m", "jaxserve", "serve", "--load", "random", "--port", "0", "--quiet", model)
    with _started(tmp_path, *arguments) as (process, url):
        loading = httpx2.get(url + "/ready", timeout=60)
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")
        assert httpx2.get(url + "/health", timeout=60).status_code == 200
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.wait(30) == 0
        log = (tmp_path / "stderr").read_text()
        assert "Traceback" not in log and "FATAL" not in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "99999"), "port=99999 is not allowed"),
        (("--host", "256.0.0.1"), "cannot be used"),
        (("--api-key-file", os.devnull), "has no key"),
        (("--api-key-file", "no-such-file"), "cannot be read"),
        (("--max-body", "much"), "'much'"),
        (("no-such-model", "--port", "0"), "UnknownModelError: 'no-such-model'"),
        (("--port", "0", "--latency-bound", "-1"), "latency_bound=-1.0 is not allowed"),
        (("--port", "0", "--quantize", "int3"), "quantize='int3'"),
        (("--port", "0", "--quantize-embeddings", "int3"), "quantize_embeddings='int3'"),
        (("--port", "0", "--groups", "1"), "groups='1' is not understood"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], said: str):
    """What cannot be served ends the command with exit code 2 and a sentence."""
    done = CliRunner().invoke(app, ["serve", "--quiet", *arguments])
    assert done.exit_code == 2, done.output
    assert said in done.output


@pytest.mark.release
def test_a_ready_server_spares_the_collector(capfd: pytest.CaptureFixture[str]):
    """What is loaded when the server is ready is not searched by later garbage collections."""
    loaded: list[Any] = [[]]
    serving.announce_ready("http://localhost:1")
    assert not any(each is loaded for each in gc.get_objects())
    assert "ready on http://localhost:1" in capfd.readouterr().err
