"""One measured run on a runtime that has served other runs before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.policies import missing_baselines, parse_policies
from benchmarks.common.serving import measure
from benchmarks.flover import overlap, timeline
from jaxserve import Runtime
from jaxserve.core.errors import InvalidConfigError, PromptTooLongError
from jaxserve.testing.tiny import MAX_CONTEXT, OPTIONS, VOCAB_SIZE, tiny_llama
from jaxserve.workload import WorkloadItem, random_items


@pytest.fixture(scope="module")
def runtime():
    """A runtime around a tiny model."""
    with Runtime(tiny_llama(), policy="flover", **OPTIONS) as runtime:
        yield runtime


def _items(num: int, num_output: int) -> list[WorkloadItem]:
    return random_items(
        num, num_prompt_tokens=5, num_output_tokens=num_output, vocab_size=VOCAB_SIZE, seed=1
    )


def test_runs_do_not_leak_into_each_other(runtime):
    """A short run after a long one counts only its own steps, tokens and pages."""
    long, _ = measure(runtime, _items(8, 40), label="long")
    short, done = measure(runtime, _items(1, 4), label="short")
    assert short["output_tokens"] == len(done[0].token_ids) == 4
    assert long["output_tokens"] == 320
    # At most the prompt, the answer, and the iterations after its end that are submitted ahead.
    ahead = 2 * 4
    assert 5 + 3 <= short["engine"]["num_tokens"] <= 5 + 3 + ahead
    assert short["engine"]["num_iterations"] < long["engine"]["num_iterations"]
    assert 1 <= short["engine"]["max_pages_owned"] <= 3 < long["engine"]["max_pages_owned"]
    assert 0 < short["engine"]["busy_s"] <= short["wall_s"] + 0.1
    assert short["engine"]["num_pages"] == long["engine"]["num_pages"]


@pytest.mark.release
def test_latencies_count_from_each_arrival(runtime):
    """Of requests that arrive a second apart, neither waits for a second, though the run does."""
    items = [replace(item, arrival_s=float(i)) for i, item in enumerate(_items(2, 4))]
    figures, _ = measure(runtime, items, label="apart")
    assert figures["wall_s"] > 1.0
    for name in ("time_to_first_token_s", "latency_s"):
        assert 0.0 < figures[name]["p50"] <= figures[name]["p99"] < 0.5


def test_failed_requests_end_the_measurement(runtime):
    """The measurement raises, since figures of half a workload mean nothing."""
    item = WorkloadItem(prompt_token_ids=(1,) * (MAX_CONTEXT + 1), num_output_tokens=2)
    with pytest.raises(PromptTooLongError):
        measure(runtime, [item], label="too long")


def test_timelines_and_overlap(runtime):
    """Times count from the first arrival; a single request has an overlap of one."""
    _, done = measure(runtime, _items(3, 8), label="three")
    assert overlap(done[:1]) == 1.0
    assert 1 / 3 <= overlap(done) <= 1.0
    rows = timeline(done)
    assert rows[0]["arrival_s"] == 0.0
    for row in rows:
        assert row["num_output_tokens"] == 8
        assert row["arrival_s"] < row["first_token_s"] < row["finished_s"]


def test_policies_by_name():
    """Presets and variants are known; unknown and repeated names are refused."""
    policies = parse_policies("flover,flover_without_shuffle")
    assert [policy.name for policy in policies] == ["flover", "flover_without_shuffle"]
    with pytest.raises(InvalidConfigError, match="nonsense"):
        parse_policies("flover,nonsense")
    with pytest.raises(InvalidConfigError, match="twice"):
        parse_policies("flover,flover")


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["orca", "flover"], []),
        (["orca", "auto"], ["vllm_like", "s3_oracle"]),
        (["s3", "s3_oracle"], ["vllm_like"]),
        (["vllm_like", "auto", "s3_oracle"], []),
    ],
)
def test_policies_by_predicted_length_have_baselines(names: list[str], missing: list[str]):
    """A comparison with `s3` or `auto` needs the policy without predictions and the oracle."""
    assert missing_baselines(names) == missing
