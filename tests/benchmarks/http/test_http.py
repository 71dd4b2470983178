"""What HTTP costs, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.http.__main__ import main
from jaxserve import Runtime
from tests.benchmarks.tiny_model import arguments
from tests.server.serving import server


def test_both_ways_answer_the_same_requests(capsys, tmp_path):
    """Each number of connections has figures of both ways, and the shares between them."""
    more = ["--connections", "1,6", "--repeats", "1"]
    assert main([*arguments(tmp_path), *more]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["connections"] for point in points] == [1, 6]
    for point in points:
        assert set(point["runs"]) == {"in process", "http"}
        ours = point["runs"]["http"]["at_once"][0]
        assert ours["tokens_per_s"] > 0 and ours["first_token_s"]["p50"] > 0
        low, high = point["throughput_share"]["range"]
        assert low <= point["throughput_share"]["median"] <= high


def test_other_servers_get_the_same_requests(capsys, tmp_path):
    """A server that runs already answers the same client, beside this one's completions."""
    options = arguments(tmp_path)
    with (
        Runtime.from_pretrained(options[1], max_slots=2, max_context=64, progress=False) as rt,
        server(rt, model_name="other", max_waiting=100) as url,
    ):
        more = ["--connections", "3", "--repeats", "1", "--peer", f"peer={url},other"]
        assert main([*options, *more]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert set(point["runs"]) == {"in process", "http", "completions", "peer"}
    assert set(point["peers_tokens_per_s"]) == {"completions", "peer"}
    for way in ("completions", "peer"):
        theirs = point["runs"][way]["at_once"][0]
        assert theirs["tokens_per_s"] > 0 and theirs["first_token_s"]["p50"] > 0


@pytest.mark.parametrize("text", ["http://127.0.0.1:1", "vllm=127.0.0.1:1", "=http://a:1"])
def test_servers_need_a_name_and_an_address(capsys, text):
    """What is neither ends the command with a sentence."""
    with pytest.raises(SystemExit):
        main(["--peer", text])
    assert "pass NAME=http://HOST:PORT,MODEL" in capsys.readouterr().err
