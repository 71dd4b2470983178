"""The report agrees with the run, in every form."""

from __future__ import annotations

import json

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.report import Report
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """A runtime that has answered ten requests on four slots.

    It has no executables of an earlier start: those are not traced, and name no kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        runtime = Runtime(tiny_llama(), **OPTIONS)
    with runtime:
        params = [SamplingParams(max_tokens=n) for n in range(3, 13)]
        runtime.generate(random_prompts(10, longest=30), params)
        yield runtime


def test_figures_add_up(runtime):
    """Tokens, steps and requests equal the runtime's counters."""
    report, stats = runtime.report(), runtime.stats()
    figures = report.figures()
    assert figures["num_requests"] == 10
    assert figures["output_tokens"] == sum(range(3, 13))
    assert figures["num_steps"] == stats.num_steps
    assert sum(step.num_tokens for step in report.steps) == stats.num_tokens
    assert max(step.num_running for step in report.steps) == 4
    assert max(step.num_waiting for step in report.steps) > 0
    assert 0 < figures["padding_share"] < 1
    assert figures["host_gap_s"] == pytest.approx(stats.host_gap_s)
    assert figures["latency_s"]["p50"] <= figures["latency_s"]["p99"]
    times = [step.collected_s for step in report.steps]
    assert times == sorted(times)


@pytest.mark.release
def test_every_form(runtime, tmp_path):
    """The report is a table, JSON, a PNG in a notebook, and a PNG on disk."""
    report = runtime.report()
    assert "output tokens" in str(report) and "75" in str(report)
    assert "10 requests with 75 output tokens" in repr(report)
    assert repr(runtime).startswith("Runtime(Llama, 2 layers, float32, policy ")
    read = json.loads(report.to_json())
    assert len(read["requests"]) == 10 and len(read["steps"]) == len(report.steps)
    assert read["requests"][0]["timing"]["finished_s"] > 0
    assert report._repr_png_().startswith(b"\x89PNG")
    figure = report.plot(tmp_path / "report.png").figure
    panels = [axes.get_title("left") for axes in figure.axes]
    assert panels == ["throughput", "batch", f"pages of {report.num_pages} in the pool", "latency"]
    assert figure.get_suptitle() == "10 requests with 75 output tokens, policy auto"
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_what_serves_attention_is_said(runtime):
    """The report has shapes and reason, and says if an implementation was requested by name."""
    report = runtime.report()
    # Other tests in this process compile for GPUs.
    ours = ("paged_attention", "cpu")
    chosen = [one for one in report.kernels if (one.operation, one.platform) == ours]
    assert chosen and all(one.reason for one in chosen)
    assert any("k_pages float32[" in one.shapes for one in chosen)
    assert chosen[0].implementation in report.figures()["kernels"]["paged_attention"]
    assert json.loads(report.to_json())["kernels"][0]["shapes"] == report.kernels[0].shapes


def test_trace_tells_steps_and_phases(runtime, tmp_path):
    """Steps do not overlap, and neither do a request's phases, from its arrival on."""
    report = runtime.report()
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    steps = [span for span in spans if span["pid"] == 1]
    assert len(steps) == len(report.steps)
    for before, after in zip(steps, steps[1:], strict=False):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    phases = [span["name"] for span in spans if span["pid"] == 2 and span["tid"] == 0]
    assert phases == ["waiting", "prompt", "answer"]


@pytest.mark.release
def test_a_report_of_nothing():
    """Before the first request every form is empty, and none raises."""
    report = Report((), (), policy="auto", num_pages=7)
    assert report.figures()["output_tokens_per_s"] is None
    assert report._repr_png_().startswith(b"\x89PNG")
    assert "auto" in str(report) and json.loads(report.to_json())["steps"] == []
