"""`jaxserve arena measure` serves a trace with a tiny model, and simulates it beside."""

from __future__ import annotations

import json

import pytest

from tests.cli.common import assert_refused, run

pytestmark = pytest.mark.release

# Two turns of a session, a request that is too long for the model, and others.
COLUMNS = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
TRACE = f"""{COLUMNS}Log Type
0,a,1,GPT-4,10,5,15,Conversation log
0,,1,GPT-4,400,5,405,API log
0.01,,1,GPT-4,20,3,23,API log
0.02,a,1,GPT-4,18,4,22,Conversation log
0.03,,1,GPT-4,9,0,9,API log
"""


def test_a_simulation_is_compared_with_the_device(model, tmp_path):
    """Both serve the same lengths; the errors are those of the means."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    common = f"arena measure --trace {trace} --model {model} --random-weights"
    sizes = "--max-slots 2 --max-context 64 --quiet"
    done = run(f"{common} {sizes} --policies vllm_like,pensieve --json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [each["policy"] for each in report["runs"]] == ["vllm_like", "pensieve"]
    for each in report["runs"]:
        for kind in ("measured", "simulated"):
            assert (each[kind]["num_requests"], each[kind]["output_tokens"]) == (4, 13)
            assert each[kind]["prompt_tokens"] == 57
        means = [each[kind]["latency_s"]["mean"] for kind in ("simulated", "measured")]
        assert each["error"]["latency_s"] == pytest.approx(means[0] / means[1] - 1)
    errors = [abs(each["error"]["latency_s"]) for each in report["runs"]]
    assert report["error"]["latency_s"] == pytest.approx(sum(errors) / 2)
    table = run(f"{common} {sizes} --policies vllm_like --num-requests 2")
    assert "mean absolute percentage error of the simulator over 1 run(s)" in table.stdout
    assert_refused(run(f"{common} --num-requests 0"), "--num-requests 0 and --load 1 are not")
