"""`jaxserve bench`, against servers and in process."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve.testing import write_chat_model
from tests.cli.common import SMALL, assert_refused, run
from tests.common.processes import heeding_interrupts, interrupt
from tests.common.streams import DONE, event, streaming, text
from tests.common.tiers import some

LINES = [
    {"prompt": "text", "max_tokens": 2},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"prompt": [5, 6, 7]},
]


def _file(folder: Path, lines: list[Any]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--url 127.0.0.1:8000 --model m", "the address '127.0.0.1:8000"),
        ("--url http://127.0.0.1:1", "/v1/models cannot be read"),
        ("--url http://127.0.0.1:1 --policy orca --replicas 2", "--policy, --replicas is for"),
        ("--groups 1 --quiet", "groups='1' is not understood"),
        ("--tokenizer a", "--tokenizer is for --url"),
        ("--rate 0", "--rate 0 is not allowed"),
        ("--concurrency -1", "--concurrency -1 is not allowed"),
        ("--num-requests 0", "--num-requests 0 is not allowed"),
        ("--random-range-ratio 1", "--random-range-ratio 1 is not allowed"),
        ("--metric-percentiles 50,101", "numbers of 0 to 100"),
        ("--goodput ttft", "--goodput 'ttft' is not understood"),
        ("--goodput itl:3", "ttft, tpot or e2el"),
        ("--url http://a --model m --dataset no-such-file", "cannot be read"),
        ("--output no-such-folder/out", "cannot write --output"),
    ],
)
def test_bad_options_are_refused(arguments, said):
    """A bad option ends the command with one message, before a model is loaded."""
    assert_refused(run(f"bench {arguments}"), said)


def test_a_server_gets_the_lines_of_a_file(tmp_path):
    """Prompts go to completions and messages to the chat, with the key; a failure is counted."""
    bodies = []

    def answer(body: dict[str, Any]) -> tuple[int, list[bytes | None]]:
        bodies.append(body)
        if body.get("prompt") == [5, 6, 7]:
            return 400, [b"no token ids"]
        usage = {"prompt_tokens": 4, "completion_tokens": 2}
        return 200, [text("a"), text("b", "stop"), event(choices=[], usage=usage), DONE]

    path, out = _file(tmp_path, LINES), tmp_path / "out.json"
    with streaming(answer) as url:
        done = run(
            f"bench --url {url}/v1 --dataset {path} --concurrency 1 --max-tokens 9 --json "
            f"--num-warmups 2 --goodput ttft:60000,e2el:60000 --goodput tpot:60000 --output {out}"
        )
    assert done.exit_code == 1, done.output
    assert "1 request(s) failed: status 400: no token ids" in done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["num_completed"], report["num_failed"]) == ("served", 2, 1)
    assert (report["prompt_tokens"], report["output_tokens"]) == (8, 4)
    assert report["goodput"]["share"] == pytest.approx(2 / 3)
    assert set(report["latency_s"]) == {"mean", "p50", "p90", "p99"}
    saved = json.loads(out.read_text())
    assert {**saved, "requests": None} == {**report, "requests": None}
    assert [bool(each["error"]) for each in saved["requests"]] == [False, False, True]
    assert len(bodies) == 5  # two of them before
    chat = bodies[-2]
    assert (chat["path"], chat["max_completion_tokens"]) == ("/v1/chat/completions", 9)
    assert chat["stream"] and "ignore_eos" not in chat
    assert (bodies[-3]["path"], bodies[-3]["max_tokens"]) == ("/v1/completions", 2)


# What `transformers serve` of transformers 5.24 and the server of llama.cpp (b11434) sent.
_REFUSED = b"""{"detail":"Unexpected fields in the request: {'ignore_eos'}"}"""
_TRANSFORMERS = [
    event(id="a", choices=[{"index": 0, "text": " "}], object="text_completion"),
    event(id="a", choices=[{"index": 0, "text": "`"}], object="text_completion"),
    event(
        id="a",
        choices=[{"finish_reason": "length", "index": 0, "text": ""}],
        usage={"completion_tokens": 2, "prompt_tokens": 8, "total_tokens": 10},
    ),
]
_LLAMA_CPP = [
    event(
        choices=[
            {"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}
        ]
    ),
    event(choices=[{"finish_reason": None, "index": 0, "delta": {"content": "Hello"}}]),
    event(choices=[{"finish_reason": None, "index": 0, "delta": {"content": " there"}}]),
    event(choices=[{"finish_reason": "length", "index": 0, "delta": {}}]),
    event(
        choices=[],
        usage={"completion_tokens": 2, "prompt_tokens": 31, "prompt_tokens_details": {}},
        timings={"cache_n": 0, "prompt_n": 31},
    ),
    DONE,
]


def _without_usage(events: list[bytes]) -> list[bytes]:
    """Return a stream without usage, as servers send it that do not know `stream_options`."""
    return [each for each in events if b'"usage"' not in each]


@pytest.mark.parametrize(
    ("events", "endpoint", "num_prompt"),
    some(
        [
            (_TRANSFORMERS, "completions", 16),
            (_LLAMA_CPP, "chat/completions", 62),
            (_without_usage(_LLAMA_CPP), "chat/completions", None),
            ([each.replace(b"data: ", b"data:") for each in _LLAMA_CPP], "chat/completions", 62),
            ([each.replace(b"\n", b"\r\n") for each in _LLAMA_CPP], "chat/completions", 62),
            ([*_TRANSFORMERS[:2], _TRANSFORMERS[2].rstrip()], "completions", 16),
        ],
        1,
        5,
    ),
    ids=["transformers", "llama.cpp", "no usage", "no space", "CRLF", "no last line end"],
)
def test_streams_of_other_servers_are_read(events, endpoint, num_prompt, tmp_path):
    """Streams without [DONE], usage, or a space after "data:" are measured like others."""
    path = _file(tmp_path, [{"prompt": "text"}, {"prompt": "more"}])
    with streaming(lambda _: (200, events)) as url:
        done = run(f"bench --url {url} --dataset {path} --endpoint /v1/{endpoint} --json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["num_completed"], report["output_tokens"]) == (2, 4)
    assert report["prompt_tokens"] == num_prompt
    assert report["time_per_output_token_s"]["mean"] >= 0


@pytest.mark.release
def test_a_server_without_token_ids_gets_text(tmp_path):
    """The error of a refused request names the options that help; with them, prompts are text."""
    write_chat_model(tmp_path)
    prompts = []

    def answer(body: dict[str, Any]) -> tuple[int, list[bytes | None]]:
        prompts.append(body["prompt"])
        if "ignore_eos" in body:
            return 422, [_REFUSED]
        if not isinstance(body["prompt"], str):
            return 400, [b'{"detail":"prompt must be a string."}']
        return 200, [*_TRANSFORMERS]

    with streaming(answer) as url:
        command = f"bench --url {url} --num-requests 2 --prompt-tokens 4"
        assert_refused(run(command), "status 422: " + _REFUSED.decode(), code=1)
        refused = run(f"{command} --no-ignore-eos")
        assert "a server that takes no token ids needs --tokenizer" in refused.output
        done = run(f"{command} --no-ignore-eos --tokenizer {tmp_path} --json")
    assert done.exit_code == 0, done.output
    assert all(isinstance(each, str) for each in prompts[2:])
    assert len(prompts) == 5


@pytest.mark.release
def test_ctrl_c_prints_what_was_measured():
    """The table has the answers that ended; the others are said to be open."""
    num_asked = 0

    def answer(_: dict[str, Any]) -> tuple[int, list[bytes | None]]:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            return 200, [text("a"), text("b"), DONE]
        threading.Timer(0.2, interrupt).start()
        return 200, [text("a"), None]

    with streaming(answer) as url, heeding_interrupts():
        done = run(f"bench --url {url} --num-requests 4 --num-warmups 0 --concurrency 1")
    assert done.exit_code == 130, done.output
    rows = {row.strip("│ ").split("│")[0].strip(): row.split() for row in done.stdout.splitlines()}
    assert "2" in rows["Completed"] and "2" in rows["Not ended"] and "0" in rows["Failed"]
    assert "Time to first token (ms)" in done.stdout


@pytest.mark.release
def test_a_runtime_in_this_process_is_measured(token_model, tmp_path):
    """Answers have the drawn lengths; a recorded run is measured again, at its own arrivals."""
    trace = tmp_path / "trace.jsonl"
    common = f"--model {token_model} {SMALL} --json --num-warmups 0"
    done = run(
        f"bench {common} --num-requests 3 --prompt-tokens 4 --output-tokens 6 "
        f"--random-range-ratio 0.5 --rate 1000 --record {trace}"
    )
    assert done.exit_code == 0, done.output
    first = json.loads(done.stdout)
    assert (first["num_completed"], first["num_failed"], first["policy"]) == (3, 0, "auto")
    assert 6 <= first["prompt_tokens"] <= 18 and 9 <= first["output_tokens"] <= 27
    again = json.loads(run(f"bench {common} --dataset {trace}").stdout)
    same = ("num_completed", "prompt_tokens", "output_tokens")
    assert [again[name] for name in same] == [first[name] for name in same]
