"""`--workload NAME` selects the requests."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from benchmarks.common import workloads
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Request, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload.recorded import TraceWriter

pytestmark = pytest.mark.fast

RUNTIME = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=50), config=SimpleNamespace(max_context=700)
)


def _items(*arguments: str):
    parser = argparse.ArgumentParser()
    for flag, settings in workloads.options():
        parser.add_argument(flag, **settings)
    return workloads.items(parser.parse_args(arguments), RUNTIME)


def _record(path) -> None:
    writer = TraceWriter(path, origin_s=0.0)
    for number in range(40):
        request = Request(
            id=str(number), prompt=(1, 2), params=SamplingParams(), arrival_s=5.0 + number
        )
        sample = Sample(text="", token_ids=(1,) * 3, finish_reason="stop")
        timing = Timing(arrival_s=request.arrival_s, finished_s=50.0)
        writer.append(
            request,
            Completion(
                request_id=request.id, prompt_token_ids=(1, 2), samples=(sample,), timing=timing
            ),
        )
    writer.close()


def test_drawn_workloads():
    """The requested number of requests is drawn, and all of them arrive at once."""
    items = _items("--workload", "uniform", "--prompt-tokens", "4", "--output-tokens", "9")
    assert {(len(i.prompt_token_ids), i.num_output_tokens) for i in items} == {(4, 9)}
    assert len(items) == workloads.NUM_REQUESTS
    tasks = _items("--workload", "task:S", "--num-requests", "7", "--scale", "0.5")
    assert (len(tasks), {i.max_tokens for i in tasks}) == (7, {40})
    assert {i.arrival_s for i in items + tasks} == {0.0}


def test_recorded_workloads(tmp_path):
    """A trace has all of its requests by default, or its first ones, with their arrival times."""
    path = tmp_path / "run.jsonl"
    _record(path)
    items = _items("--workload", f"recorded:{path}")
    assert [i.arrival_s for i in items] == [float(number) for number in range(40)]
    assert _items("--workload", f"recorded:{path}", "--num-requests", "3") == items[:3]
    with pytest.raises(InvalidConfigError, match="cannot read"):
        _items("--workload", f"recorded:{path}.missing")


def test_unknown_and_unfitting_workloads_are_refused(capsys):
    """A name is checked before data is loaded; lengths are checked against the context."""
    with pytest.raises(SystemExit):
        _items("--workload", "task:X")
    assert "'task:X' is unknown" in capsys.readouterr().err
    with pytest.raises(InvalidConfigError, match="--scale"):
        _items("--workload", "task:C2")
