"""Recorded traces: written data is read back, and errors name the file and the line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Request, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload import WorkloadItem
from jaxserve.workload.recorded import RecordedRequest, TraceWriter, read, recorded_items

pytestmark = pytest.mark.fast

PARAMS = SamplingParams(
    max_tokens=40,
    min_tokens=2,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    logit_bias={3: -1.5, 7: 2.0},
    stop=("\n", "é\u2028"),
    stop_token_ids=(9,),
    n=2,
)


def _request(number: int = 0, params: SamplingParams = PARAMS, **fields) -> Request:
    given = {"arrival_s": 10.0 + number, "seed": 77, "stop_token_ids": (9, 1), **fields}
    return Request(id=f"request-{number}", prompt=(5, 6, 7), params=params, **given)


def _completion(request: Request, *lengths: int, reason: str = "stop") -> Completion:
    return Completion(
        request_id=request.id,
        prompt_token_ids=request.prompt,
        samples=tuple(
            Sample(text="", token_ids=(1,) * length, finish_reason=reason) for length in lengths
        ),
        timing=Timing(arrival_s=request.arrival_s, finished_s=request.arrival_s + 2.5),
    )


def _write(path: Path, *ended: tuple[Request, Completion]) -> Path:
    writer = TraceWriter(path, origin_s=10.0)
    for request, completion in ended:
        writer.append(request, completion)
    writer.close()
    return path


@pytest.fixture
def trace(tmp_path) -> Path:
    """A trace of three requests, in the order of their ends."""
    requests = [_request(number, replace(PARAMS, n=1)) for number in range(3)]
    ended = [(requests[i], _completion(requests[i], 4 + i)) for i in (1, 2, 0)]
    return _write(tmp_path / "run.jsonl", *ended)


def test_everything_asked_for_comes_back(tmp_path):
    """Parameters with the drawn seed, priority, deadline, lengths and times are equal."""
    request = _request(3, priority=-2, deadline_s=20.5)
    [got] = read(_write(tmp_path / "run.jsonl", (request, _completion(request, 4, 9))))
    assert got == RecordedRequest(
        id="request-3",
        arrival_s=3.0,
        prompt_token_ids=(5, 6, 7),
        params=replace(PARAMS, seed=77),
        priority=-2,
        deadline_s=10.5,
        num_output_tokens=(4, 9),
        finish_reasons=("stop", "stop"),
        finished_s=5.5,
        output_token_ids=((1,) * 4, (1,) * 9),
    )


def test_traces_from_before_tokens_were_written_are_read(trace):
    """All other fields are read; a field that is not a list of tokens is refused."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    whole = read(trace)
    _dump(trace, [{k: v for k, v in line.items() if k != "output_token_ids"} for line in lines])
    assert read(trace) == [replace(request, output_token_ids=None) for request in whole]
    _dump(trace, [{**lines[0], "output_token_ids": [["a"]]}])
    with pytest.raises(InvalidConfigError, match="output_token_ids"):
        read(trace)


def _dump(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_numbers_of_numpy_are_numbers(tmp_path):
    """Numbers of any type are written and read again."""
    params = SamplingParams(
        max_tokens=np.int64(8),
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        logit_bias={np.int64(2): np.float32(0.25)},
    )
    request = _request(params=params, seed=np.uint32(5), priority=True, deadline_s=math.inf)
    [got] = read(_write(tmp_path / "run.jsonl", (request, _completion(request, 4))))
    expected = SamplingParams(max_tokens=8, temperature=0.5, top_k=3, logit_bias={2: 0.25}, seed=5)
    assert (got.params, got.priority, got.deadline_s) == (expected, 1, None)


def test_requests_come_by_arrival_and_items_start_at_zero(trace):
    """A file has requests in the order of ends; a workload has them in the order of arrivals."""
    assert [request.id for request in read(trace)] == ["request-0", "request-1", "request-2"]
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:2]))
    items = recorded_items(trace)
    assert [(item.arrival_s, item.num_output_tokens) for item in items] == [(0.0, 5), (1.0, 6)]
    assert recorded_items(trace, 1) == items[:1]
    with pytest.raises(InvalidConfigError, match="num=3 is more than"):
        recorded_items(trace, 3)


def test_answers_are_forced_to_what_they_were(tmp_path):
    """Nothing else ends them; samples keep their lengths, and an empty one gets one token."""
    request = _request(2, deadline_s=14.5, priority=3)
    cancelled = _completion(request, 6, 0, reason="cancelled")
    [item] = recorded_items(_write(tmp_path / "run.jsonl", (request, cancelled)))
    assert item == WorkloadItem(
        prompt_token_ids=(5, 6, 7),
        num_output_tokens=6,
        sample_lengths=(6, 1),
        max_tokens=40,
        sampling=replace(PARAMS, seed=77, stop=(), stop_token_ids=(), min_tokens=0),
        priority=3,
        deadline_s=2.5,
    )
    params = item.params()
    assert (params.forced_length, params.ignore_eos) == ((6, 1), True)
    assert (params.temperature, params.top_k, params.seed, params.n) == (0.7, 5, 77, 2)


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_cut_last_line_is_left_out(trace, cut):
    """A process that was killed while writing loses only that line."""
    data = trace.read_bytes()
    trace.write_bytes(data[:-cut])
    whole = 3 if cut == 1 else 2  # a missing newline alone loses no line
    assert len(read(trace)) == whole


def test_lines_are_in_the_file_as_soon_as_they_are_written(tmp_path):
    """A killed run has written every request that had ended."""
    request = _request()
    writer = TraceWriter(tmp_path / "run.jsonl", origin_s=0.0)
    for count in (1, 2):
        writer.append(request, _completion(request, 4, 4))
        assert len(read(tmp_path / "run.jsonl")) == count
    writer.close()
    writer.append(request, _completion(request, 4, 4))
    assert len(read(tmp_path / "run.jsonl")) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arrival_s": "soon"}, "arrival_s='soon'"),
        ({"arrival_s": math.nan}, "arrival_s=nan"),
        ({"arrival_s": 10**400}, "arrival_s=10000"),
        ({"priority": 2**31}, "use a whole number of -2147483647 to 2147483647"),
        ({"prompt_token_ids": [2**31]}, "list of token ids"),
        ({"prompt_token_ids": []}, "list of token ids"),
        ({"prompt_token_ids": [1, True]}, "list of token ids"),
        ({"params": []}, "use an object"),
        ({"params": {"top": 3}}, "'top'"),
        ({"params": {"top_p": 2}}, "top_p=2"),
        ({"params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"params": {"logit_bias": [1]}}, "logit_bias"),
        ({"params": {"n": 2, "temperature": 1.0}}, "for n=2"),
        ({"params": {"max_tokens": 4}}, "forced_length=5 is more than max_tokens=4"),
        ({"priority": 1.5}, "use a whole number"),
        ({"deadline_s": "late"}, "number or null"),
        ({"num_output_tokens": 5}, "num_output_tokens=5"),
        ({"num_output_tokens": [-1]}, "whole numbers of at least 0"),
        ({"finish_reasons": ["bored"]}, "bored"),
        ({"finish_reasons": [[]]}, "finish_reasons"),
        ({"extra": 1}, "extra"),
    ],
)
def test_bad_lines_are_refused_by_file_and_line(trace, changes, said):
    """The error names file, line and reason."""
    lines = trace.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[0]) | changes)
    trace.write_text("\n".join(lines))
    with pytest.raises(InvalidConfigError, match=r"run\.jsonl line 2: ") as raised:
        read(trace)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "line", ["{", "[1]", "7", '{"id": "x"}', '{"arrival_s": %s}' % ("9" * 5000), "[" * 100_000]
)
def test_lines_that_are_no_request_are_refused(trace, line):
    """Truncated JSON in the middle of the file, and other JSON, are refused."""
    text = trace.read_text()
    trace.write_text(f"{line}\n{text}")
    with pytest.raises(InvalidConfigError, match=r"run\.jsonl line 1"):
        read(trace)


def test_files_that_cannot_be_read_or_written(trace, tmp_path):
    """A missing file, a binary one, one with a recorded run, and a missing folder are refused."""
    with pytest.raises(InvalidConfigError, match="cannot read"):
        read(tmp_path / "missing")
    with pytest.raises(InvalidConfigError, match="is not empty"):
        TraceWriter(trace, origin_s=0.0)
    with pytest.raises(InvalidConfigError, match="cannot be written"):
        TraceWriter(tmp_path / "missing" / "run.jsonl", origin_s=0.0)
    trace.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfigError, match="cannot read"):
        read(trace)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is full")
def test_a_full_disk_ends_the_recording_only(caplog):
    """The error is logged once, and later requests are served without recording."""
    request = _request()
    writer = TraceWriter("/dev/full", origin_s=0.0)
    for _ in range(2):
        writer.append(request, _completion(request, 4, 4))
    assert caplog.text.count("has ended") == 1
