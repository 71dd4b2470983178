"""The arena: runs are kept and found again, figures are right, and blame accounts for all time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.arena import (
    ArenaResult,
    ArenaResults,
    ArenaRun,
    Pilots,
    ServedRequest,
    cost_of,
    default_policies,
    digest_of,
    interval,
    parts_of,
    play,
    policies_in,
)
from jaxserve.planning.blame import Blame
from jaxserve.scheduling.presets import PRESETS
from tests.docs.blocks import blocks

pytestmark = pytest.mark.fast

# Two parts of 8 prompts of 600 tokens and more, which come at nearly the same time.
NUM = 8
ROWS = "".join(
    f"2024-05-10 00:00:0{i // NUM}.{i % NUM:02}0000+00:00,{600 + 7 * i},{6 + i}\n"
    for i in range(2 * NUM)
)
COST = cost_of("Llama-3-8B", "A100")


@pytest.fixture
def run(tmp_path: Path) -> ArenaRun:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + ROWS)
    return ArenaRun(
        version="0",
        trace=str(path),
        trace_bytes=path.stat().st_size,
        start_s=0.0,
        num_requests=NUM,
        arrivals=None,
        max_tokens=30,
        max_context=2048,
        prediction_error=0.7,
        model="Llama-3-8B",
        device="A100",
        max_slots=NUM,
        kv_memory=int(250 * COST.page_bytes),
        load=1.0,
        seed=0,
        policy="vllm_like",
        policy_file=None,
        digest=digest_of(PRESETS["vllm_like"], None),
    )


def _no_tokenizer():
    raise AssertionError("the trace has no texts")


def _played(run: ArenaRun, policy: str = "vllm_like", **more) -> ArenaResult:
    _, parts = parts_of(run, 2, _no_tokenizer)
    return play(run, parts[run.seed], PRESETS[policy], **more)


@pytest.mark.parametrize("policy", [each.name for each in default_policies()])
def test_every_policy_serves_all_requests(run, policy):
    """Each request gets its recorded length, whatever the policy."""
    result = _played(run, policy)
    assert not result.error
    assert [each.number for each in result.requests] == list(range(NUM))
    assert [each.num_output_tokens for each in result.requests] == [6 + i for i in range(NUM)]
    assert all(each.finished_s > each.first_token_s > each.arrival_s for each in result.requests)
    assert result.memory and all(0 <= share <= 1 for _, share in result.memory)


def test_parts_and_loads_differ_and_repeat(run):
    """A seed is another part; the load divides arrivals; the same run has the same result."""
    first, second = _played(run), _played(replace(run, seed=1))
    assert first == _played(run) != second
    assert [each.num_prompt_tokens for each in second.requests][:2] == [656, 663]
    twice = _played(replace(run, load=2.0))
    assert [2 * each.arrival_s for each in twice.requests] == pytest.approx(
        [each.arrival_s for each in first.requests]
    )


@pytest.mark.parametrize(
    ("policy", "max_slots"), [("vllm_like", 2), ("orca", NUM), ("s3", 2), ("auto", NUM)]
)
def test_blame_accounts_for_all_of_a_latency(run, policy, max_slots):
    """The spans of a request follow each other from its arrival to its end."""
    run = replace(run, max_slots=max_slots)
    result = _played(run, policy)
    slowest = max(result.requests, key=lambda each: each.latency_s)
    blame = Blame(slowest.index)
    assert _played(run, policy, pilot=blame) == result
    spans = blame.spans
    assert spans[0].start_s == pytest.approx(slowest.arrival_s)
    assert spans[-1].end_s == pytest.approx(slowest.finished_s, abs=1e-5)
    assert all(a.end_s == b.start_s for a, b in zip(spans, spans[1:], strict=False))
    causes = {span.cause for span in spans}
    assert "its answer" in causes
    assert ("slots" in causes) == (max_slots == 2)


def test_blame_names_memory_and_prompts(run):
    """With slots for all, requests wait for pages, and answers run beside others' prompts."""
    run = replace(run, kv_memory=int(60 * COST.page_bytes))
    blames = [Blame(index) for index in range(NUM)]
    _played(run, pilot=Pilots(lambda _: None, blames))
    spans = [span for blame in blames for span in blame.spans]
    causes = {span.cause for span in spans}
    assert {"memory", "its prompt", "its answer", "its answer, beside others' prompts"} <= causes
    assert any("pages of" in span.detail for span in spans if span.cause == "memory")


def test_figures_count_what_the_requests_say():
    """Latencies, goodput and fairness are those of the times, by hand."""
    result = ArenaResult(
        wall_s=10.0,
        requests=(
            ServedRequest(0, 0, 5, 11, 0.0, 0.0, 1.0, 2.0, 0),
            ServedRequest(1, 1, 5, 1, 1.0, 1.0, 5.0, 5.0, 1),
            ServedRequest(2, 2, 5, 1, 1.0, -1.0, -1.0, -1.0, 0, "too long"),
        ),
    )
    figures = result.figures({}, {"ttft": 1.0, "tpot": 0.1})
    assert (figures["num_completed"], figures["num_failed"]) == (2, 1)
    assert figures["output_tokens_per_s"] == pytest.approx(1.2)
    assert figures["time_per_output_token_s"]["p50"] == pytest.approx(0.1)
    assert figures["goodput"]["share"] == pytest.approx(1 / 3)
    slow, fast = 4.0, 2 / 11
    assert figures["fairness"] == pytest.approx((slow + fast) ** 2 / 2 / (slow**2 + fast**2))
    assert result.figures({0: "a", 1: "a"}, None)["fairness"] == 1.0


def test_intervals_are_students():
    """By hand: the mean of 1, 2 and 3, and 4.303 standard errors."""
    assert interval([5.0]) == (5.0, None)
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5))


def test_results_are_found_again(run, tmp_path):
    """A line that was cut off is removed; other settings are other runs."""
    path = tmp_path / "arena.jsonl"
    result = _played(run)
    kept = ArenaResults(path)
    kept.add(run, result)
    with path.open("a") as file:
        file.write('{"run": {"trace')
    again = ArenaResults(path)
    assert again.get(run) == result and again.get(replace(run, load=2.0)) is None
    again.add(replace(run, load=2.0), result)
    assert [each.load for each in ArenaResults(path).runs()] == [1.0, 2.0]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("text", ["hello\n", "{}\n", '{"run": {}, "result": {}}\n', "no line end"])
def test_other_files_are_no_results(tmp_path, text):
    """A file of something else is refused, and left as it is."""
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match="other:1 is not a result of the arena"):
        ArenaResults(path)
    assert path.read_text() == text


def test_an_order_of_the_guide_is_read_from_a_file(tmp_path):
    """A file as docs/adding_a_policy.md has it, whose annotations are texts, defines a policy."""
    order = blocks("adding_a_policy.md")[0].text
    more = (
        "from jaxserve.scheduling.policy import Policy\n"
        "from jaxserve.scheduling.presets import PRESETS\nfrom dataclasses import replace\n"
        "base = PRESETS['vllm_like']\n"
        "mine = replace(base, name='mine', order=ShortestPromptFirst())\n"
    )
    path = tmp_path / "my policy.py"
    path.write_text(order + more)
    assert "from __future__ import annotations" in order
    assert [each.name for each in policies_in(path)] == ["mine"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "defines no Policy"),
        ("import nothing_like_it", r"ModuleNotFoundError: .*mine.py:1"),
        ("def f(:", "SyntaxError"),
        (
            "from dataclasses import replace\nfrom jaxserve.scheduling.presets import PRESETS\n"
            "p = replace(PRESETS['orca'], name='auto')",
            "has the name of a preset",
        ),
    ],
)
def test_a_policy_file_that_is_wrong_is_refused(tmp_path, text, said):
    """The message names the file, and the line if its code fails."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=said):
        policies_in(path)


@pytest.mark.parametrize(
    ("model", "device", "said"),
    [
        ("T5-11B", "A100", "model 'T5-11B' is unknown"),
        ("OPT-13B", "TPU", "device 'TPU' is unknown"),
        ("GPT3-175B", "A100", "and a A100 has less"),
    ],
)
def test_a_device_that_cannot_serve_is_refused(model, device, said):
    """Unknown names have the known ones beside them."""
    with pytest.raises(InvalidConfigError, match=said):
        cost_of(model, device)
