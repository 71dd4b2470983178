"""`jaxserve arena` on a tiny trace: the table, what is kept, and why a request was late."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.common import assert_refused, run
from tests.docs.blocks import blocks

pytestmark = pytest.mark.fast


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of 16 requests, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:0{i % 8}+00:00,{300 + 40 * i},{5 + i}" for i in range(16)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *sorted(rows)]))
    return path


def _mine(more: str = "") -> None:
    """Write the policy of the page, changed by `more`."""
    [block] = [each for each in blocks("arena.md") if each.kind == "python"]
    Path("my_policy.py").write_text(block.text + more)


OPTIONS = "--policies vllm_like,orca --seeds 2 --num-requests 8 --quiet"


def test_a_policy_is_compared_with_presets(trace):
    """The user's policy is first, with the means over the parts and their intervals."""
    _mine()
    done = run(f"arena my_policy.py --trace {trace} {OPTIONS} --json --load 1,20")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["trace"]["requests_a_run"] == 8
    assert [(row["policy"], row["load"], row["num_seeds"]) for row in report["rows"]] == [
        (policy, load, 2) for load in (1, 20) for policy in ("short_first", "vllm_like", "orca")
    ]
    for row in report["rows"]:
        mean, half = row["latency_s_p99"]
        assert mean > 0 and half >= 0
        assert 0 <= row["goodput_share"][0] <= 1 and 0 < row["fairness"][0] <= 1
    assert [row["latency_p99_ratio"][0] for row in report["rows"][1::3]] == [1.0, 1.0]
    table = run(f"arena my_policy.py --trace {trace} {OPTIONS} --load 20 --page page.html")
    assert "short_first" in table.stdout and "±" in table.stdout
    assert "<td>short_first</td>" in Path("page.html").read_text()


def test_runs_are_kept_and_an_interruption_goes_on(trace):
    """Ctrl-C prints what is there; the next call simulates only what is missing."""
    _mine("\nraise_at = [12]\n")
    text = Path("my_policy.py").read_text()
    counted = text.replace(
        "    def key(self, sequence, lengths):\n",
        "    def key(self, sequence, lengths):\n"
        "        raise_at[0] -= 1\n"
        "        if not raise_at[0]:\n"
        "            raise KeyboardInterrupt\n",
    )
    assert counted != text
    Path("my_policy.py").write_text(counted)
    done = run(f"arena my_policy.py --trace {trace} {OPTIONS}")
    assert done.exit_code == 130 and "goes on from arena.jsonl" in done.stderr, done.output
    kept = Path("arena.jsonl").read_text()
    assert kept.count("\n") == 1
    _mine()
    done = run(f"arena my_policy.py --trace {trace} {OPTIONS}")
    assert done.exit_code == 0, done.output
    lines = Path("arena.jsonl").read_text()
    assert lines.startswith(kept) and lines.count("\n") == 1 + 6
    run(f"arena my_policy.py --trace {trace} {OPTIONS}")
    assert Path("arena.jsonl").read_text() == lines


def test_a_policy_that_raises_fails_alone(trace):
    """The others are compared, and the error names the line."""
    _mine()
    text = Path("my_policy.py").read_text()
    Path("my_policy.py").write_text(text.replace("return aged", "return 1 // 0, aged"))
    done = run(f"arena my_policy.py --trace {trace} {OPTIONS} --json")
    assert done.exit_code == 1
    assert "short_first failed: ZeroDivisionError" in done.stderr and "my_policy.py:" in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert rows[0]["output_tokens_per_s"] is None and rows[1]["num_seeds"] == 2


def test_why_a_request_was_late(trace):
    """The causes fill its latency, and the other policies' times are beside it."""
    run(f"arena --trace {trace} {OPTIONS} --load 20 --max-slots 2")
    done = run("arena why slowest --policy vllm_like --seed 1 --json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    request = report["request"]
    whole_s = sum(span["end_s"] - span["start_s"] for span in report["spans"])
    assert whole_s == pytest.approx(request["finished_s"] - request["arrival_s"], abs=1e-4)
    assert "slots" in {span["cause"] for span in report["spans"]}
    assert set(report["others"]) == {"vllm_like", "orca"}
    assert report["others"]["vllm_like"] == request
    table = run("arena why 3")
    assert "request 3 under orca" in table.stdout and "orca (this run)" in table.stdout
    assert_refused(run("arena why 99"), "request '99' is not in the run")
    assert_refused(run("arena why 1 --policy s3"), "its policies are vllm_like, orca")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "--trace is missing"),
        ("--trace no-such-file", "the trace no-such-file cannot be read"),
        ("--trace trace.csv --seeds 0", "--seeds 0 is not allowed"),
        ("--trace trace.csv --seeds 99", "16 requests have no part 0 of 0"),
        ("--trace trace.csv --load 1,x", "--load '1,x' is not allowed"),
        ("--trace trace.csv --rate 0", "--rate 0 is not allowed"),
        ("--trace trace.csv --prediction-error -1", "--prediction-error '-1' is not allowed"),
        ("--trace trace.csv --policies none_such", "policy='none_such' is not a preset"),
        ("--trace trace.csv --policies exegpt_waa_c", "has 2 device groups"),
        ("--trace trace.csv --kv-memory 1MiB", "that fits (16 do not)"),
        ("--trace trace.csv --goodput ttft", "--goodput 'ttft' is not understood"),
        ("--trace trace.csv --results trace.csv", "is not a result of the arena"),
        ("no_such.py --trace trace.csv", "the policy file no_such.py cannot be run"),
        ("--trace trace.csv --page no/page.html", "there is no folder no"),
        ("why 3", "arena.jsonl does not exist"),
    ],
)
def test_bad_options_are_refused(trace, arguments, said):
    """A bad option ends the command with one message, before anything is simulated."""
    assert_refused(run(f"arena {arguments}"), said)
