"""Public traces: every format is recognised and read, and a replay keeps what the trace says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.workload.traces import Replay, Trace, read_trace

pytestmark = pytest.mark.fast

# Files of the forms that the sources of `trace_formats` have, with values of our own.
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,400,10\r\n"
    "2023-11-16 18:17:05.2299600,30,0"  # no line end, as in the published file
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.250000+00:00,400,10\n"
    "2024-05-10 00:00:01+00:00,30,7\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,40,10,50,Conversation log\n"
    "6,GPT-4,0,0,0,API log\n"
    "45,GPT-4,7,0,7,API log\n"
)
BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,aa-1,43,GPT-4,40,10,50,Conversation log\n"
    "19440112.0,,2,ChatGPT,36,29,65,API log\n"
    "19440160.0,aa-1,9,GPT-4,60,5,65,Conversation log\n"
    "19440190.0,aa-1,9,GPT-4,20,5,25,Conversation log\n"
)
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 90]},
    {"timestamp": 1500, "input_length": 1500, "output_length": 3, "hash_ids": [46, 47, 91]},
    {"timestamp": 1500, "input_length": 512, "output_length": 0, "hash_ids": [92]},
]
SMALL_BLOCKS = [
    {"timestamp": 0, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3]},
    {"timestamp": 9, "input_length": 16, "output_length": 2, "hash_ids": [1]},
]
RECORDED = {
    "id": "request-0",
    "arrival_s": 0.25,
    "prompt_token_ids": [5, 6, 7],
    "params": {"max_tokens": 9},
    "priority": 0,
    "deadline_s": None,
    "num_output_tokens": [4],
    "finish_reasons": ["stop"],
    "finished_s": 2.5,
}
RESULT = {"input_lens": [9, 8], "output_lens": [3, 4], "start_times": [10.0, 11.5], "ttfts": []}
SHAREGPT = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "human", "value": "one two three four five"},
            {"from": "gpt", "value": "six seven eight nine"},
        ],
    }
]
PROMPTS = [{"prompt": "one two three", "output_tokens": 4}, {"prompt": [7, 8], "output_tokens": 2}]


class _Words:
    def encode(self, text: str, /) -> list[int]:
        return [len(word) for word in text.split()]


def _lines(objects: list[dict]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def _file(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def _shape(trace: Trace) -> list[tuple[float | None, int, int]]:
    return [
        (each.arrival_s, each.num_prompt_tokens, each.num_output_tokens) for each in trace.requests
    ]


@pytest.mark.parametrize(
    ("text", "format", "requests"),
    [
        (AZURE_2023, "Azure LLM 2023 or 2024", [(0.0, 400, 10), (1.25, 30, 0)]),
        ("\ufeff" + AZURE_2024, "Azure LLM 2023 or 2024", [(0.0, 400, 10), (0.75, 30, 7)]),
        (BURST, "BurstGPT", [(0.0, 40, 10), (40.0, 7, 0)]),
        (
            BURST_SESSIONS,
            "BurstGPT",
            [(0.0, 40, 10), (2.0, 36, 29), (50.0, 60, 5), (80.0, 20, 5)],
        ),
        (_lines(MOONCAKE), "Mooncake", [(0.0, 1100, 5), (0.5, 1500, 3), (0.5, 512, 0)]),
        (_lines([RECORDED]), "a trace of --record", [(0.0, 3, 4)]),
        (json.dumps(RESULT), "a detailed result of vllm bench serve", [(0.0, 9, 3), (1.5, 8, 4)]),
        (_lines(PROMPTS), "vLLM's custom data set", [(None, 3, 4), (None, 2, 2)]),
        (json.dumps(SHAREGPT), "ShareGPT", [(None, 5, 4)]),
    ],
)
def test_each_format_is_recognised_and_read(tmp_path, text, format, requests):
    """Times are seconds from the first request, whatever the unit and clock of the file."""
    trace = read_trace(_file(tmp_path, text), tokenizer=_Words)
    assert trace.format == format
    assert _shape(trace) == [
        (time if time is None else pytest.approx(time, abs=1e-6), prompt, output)
        for time, prompt, output in requests
    ]
    assert trace.has_times == (requests[0][0] is not None)


def test_failures_without_a_prompt_are_counted_and_left_out(tmp_path):
    """A request of 0 tokens is left out; one with a prompt and no answer gets one token."""
    trace = read_trace(_file(tmp_path, BURST))
    assert (trace.num_empty, trace.num_without_answer) == (1, 1)
    assert [item.num_output_tokens for item in _replay(trace).items] == [10, 1]


def _replay(trace: Trace, max_tokens: int | None = None, vocab_size: int = 1 << 30) -> Replay:
    return Replay(trace, max_tokens=max_tokens, vocab_size=vocab_size)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("vocab_size", [64, 1 << 30])
def test_equal_blocks_are_equal_prefixes(tmp_path, vocab_size):
    """Prompts share as many tokens as their first hashes say, in any vocabulary."""
    items = _replay(read_trace(_file(tmp_path, _lines(MOONCAKE))), vocab_size=vocab_size).items
    prompts = [item.prompt_token_ids for item in items]
    assert [len(prompt) for prompt in prompts] == [1100, 1500, 512]
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)
    # Two equal tokens may follow by chance of the digits.
    assert 1024 <= _common(prompts[0], prompts[1]) <= 1025
    assert _common(prompts[0], prompts[2]) <= 1


def test_the_size_of_blocks_is_that_of_the_file(tmp_path):
    """Files of the form of Mooncake's may have other blocks, as vLLM's `timed_trace` allows."""
    trace = read_trace(_file(tmp_path, _lines(SMALL_BLOCKS)))
    assert {request.block_tokens for request in trace.requests} == {16}


def _answered(prompt: tuple[int, ...], num: int) -> Completion:
    sample = Sample(text="", token_ids=(3,) * num, finish_reason="length")
    return Completion(
        request_id="r", prompt_token_ids=prompt, samples=(sample,), timing=Timing(arrival_s=0.0)
    )


def test_a_turn_follows_the_answer_before_it(tmp_path):
    """A session's next prompt has its history, if it fits, and never comes before the answer."""
    replay = _replay(read_trace(_file(tmp_path, BURST_SESSIONS)))
    assert replay.numbers == [0, 1]
    prompt = replay.items[0].prompt_token_ids
    second = replay.follow_up(0, _answered(prompt, 10), 1.0)
    assert second is not None and second.arrival_s == 50.0
    assert second.prompt_token_ids[:50] == (*prompt, *[3] * 10)
    assert len(second.prompt_token_ids) == 60
    # The third turn is shorter than its history, so nothing is known of what it repeats.
    third = replay.follow_up(2, _answered(second.prompt_token_ids, 5), 99.0)
    assert third is not None and third.arrival_s == 99.0
    assert len(third.prompt_token_ids) == 20 and _common(third.prompt_token_ids, prompt) <= 1
    assert replay.numbers == [0, 1, 2, 3]
    assert replay.follow_up(1, _answered((1,), 1), 1.0) is None


def test_parts_keep_gaps_and_load_scales_them(tmp_path):
    """Parts follow each other, begin at 0, and keep their bursts; the load divides times."""
    lines = [{**MOONCAKE[0], "timestamp": 1000 * t} for t in (0, 1, 1, 7, 8, 20, 30)]
    path = _file(tmp_path, _lines(lines))
    trace = read_trace(path)
    assert [[each.arrival_s for each in trace.part(i, 3).requests] for i in (0, 1)] == [
        [0.0, 1.0, 1.0],
        [0.0, 1.0, 13.0],
    ]
    assert [each.arrival_s for each in trace.part(1, 3).at_load(2.0).requests] == [0.0, 0.5, 6.5]
    with pytest.raises(InvalidConfigError, match="7 requests have no part 2 of 3"):
        trace.part(2, 3)
    late = read_trace(path, start_s=8, num=2)
    assert [each.arrival_s for each in late.requests] == [0.0, 12.0]


def test_requests_beyond_the_context_are_counted(tmp_path):
    """A request fits with its prompt and answer; one without an answer takes one token."""
    trace = read_trace(_file(tmp_path, _lines(MOONCAKE)), max_context=1105)
    assert (_shape(trace), trace.num_too_long) == ([(0.0, 1100, 5), (0.5, 512, 0)], 1)
    with pytest.raises(InvalidConfigError, match=r"that fits \(3 do not\)"):
        read_trace(_file(tmp_path, _lines(MOONCAKE)), max_context=512)


def _servegen(folder: Path) -> Path:
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    for number, (rate, pattern) in enumerate([(0.5, "Gamma"), (0.1, "Weibull")]):
        rows = [f"0,{rate},1.5,{pattern},0.6,2.0", "600,0,0,,0,0", f"1200,{rate},1,{pattern},1.0,1"]
        (folder / f"chunk-{number}-trace.csv").write_text("\n".join(rows) + "\n")
        lengths = {"input_tokens": "{40: 0.25, 41: 0.75}", "output_tokens": "{5: 1.0}"}
        (folder / f"chunk-{number}-dataset.json").write_text(
            json.dumps({"0": lengths, "600": empty})
        )
    return folder


def test_clients_of_servegen_send_at_their_rates(tmp_path):
    """Each window has its client's rate and lengths, a window without a pattern has none."""
    trace = read_trace(_servegen(tmp_path), seed=3)
    assert trace.format == "ServeGen"
    times = [each.arrival_s for each in trace.requests]
    assert times == sorted(times) and not any(600 <= time < 1100 for time in times)
    # The last gap of a window ends with it.
    assert [
        sum(each.tenant == f"chunk-{client}" for each in trace.requests) for client in (0, 1)
    ] == [2 * 299, 2 * 59]
    assert {each.num_prompt_tokens for each in trace.requests} == {40, 41}
    tenants = [item.sampling.tenant for item in _replay(trace).items]
    assert tenants == [each.tenant for each in trace.requests]
    assert trace == read_trace(tmp_path, seed=3) != read_trace(tmp_path, seed=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "none of the known formats"),
        (AZURE_2024 + "yesterday,1,1\n", "trace:4: TIMESTAMP='yesterday' is not allowed"),
        (AZURE_2024 + "2024-05-10 00:00:02,1\n", "trace:4: the line=.* use 3 fields"),
        (BURST + "7,GPT-4,-1,2,1,API log\n", "trace:5: Request tokens='-1' is not allowed"),
        (BURST + "x,GPT-4,1,2,3,API log\n", "trace:5: Timestamp='x' is not allowed"),
        (_lines([*MOONCAKE] * 34 + [{**MOONCAKE[0], "hash_ids": [1]}]), "id for each 512 of 1100"),
        (_lines([{**MOONCAKE[0], "hash_ids": list(range(999))}]), "blocks of no size"),
        (_lines([*MOONCAKE, {"timestamp": 3}]), "trace:4: the line"),
        (_lines(MOONCAKE) + "{", "trace:4 is not JSON"),
        (_lines([{"prompt": [1]}]), "output_tokens"),
        (_lines([{"prompt": "text", "output_tokens": 2}]), "pass a tokenizer"),
        (json.dumps({"input_lens": [1], "output_lens": []}), "is not a whole result"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request from second 0 on"),
    ],
)
def test_a_malformed_trace_is_refused(tmp_path, text, said):
    """The message names the place, what was given, and what is allowed."""
    with pytest.raises(InvalidConfigError, match=said):
        read_trace(_file(tmp_path, text))


def test_a_missing_trace_is_refused(tmp_path):
    """A path that cannot be read is refused, and so is a folder of anything else."""
    with pytest.raises(InvalidConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(InvalidConfigError, match="none of the known formats"):
        read_trace(tmp_path)
