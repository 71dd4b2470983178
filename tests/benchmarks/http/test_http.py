"""What HTTP costs, end to end on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.processes import PeerError
from benchmarks.http.__main__ import main
from benchmarks.http.peers import servers
from benchmarks.http.peers.servers import PEERS, SCRIPTS, PeerServer
from benchmarks.http.ways import completions_of
from benchmarks.offline.peers.compare import Environment
from jaxserve import Runtime
from jaxserve.workload import random_items
from jaxserve.workload.load import TimedAnswer
from tests.benchmarks.tiny_model import arguments
from tests.server.serving import server

pytestmark = pytest.mark.release


def test_both_ways_answer_the_same_requests(capsys, tmp_path):
    """Each number of connections has figures of both ways, and what HTTP costs."""
    more = ["--connections", "1,6", "--repeats", "2"]
    assert main([*arguments(tmp_path), *more]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["connections"] for point in points] == [1, 6]
    for point in points:
        assert set(point["ways"]) == {"in process", "socket", "http"}
        ours = point["ways"]["http"]
        assert ours["at_once"]["tokens_per_s"] > 0 and len(ours["runs"]) == 2
        assert 0 < ours["poisson"]["first_token_s"]["p50"] < ours["poisson"]["wall_s"]
        shares = [way["poisson"]["share_of_own_rate"] for way in point["ways"].values()]
        assert shares[0] == pytest.approx(0.5) and shares[1] > 0
        for run in ours["runs"]:
            at_once = run["at_once"]
            num_tokens = point["connections"] * 6
            assert at_once["tokens_per_s"] * at_once["wall_s"] == pytest.approx(num_tokens)
        for way in point["ways"].values():
            for run in way["runs"]:
                _check_phases(run["poisson"])
        low, high = point["costs"]["range"]["throughput_share"]
        assert low <= point["costs"]["throughput_share"] <= high
        shares_read = [share["cpu"] for share in point["share_of_reading"].values()]
        assert len(shares_read) == 2 and all(0 < share < 1 for share in shares_read)


def _check_phases(poisson: dict[str, Any]) -> None:
    """Check that the parts of the first token's time are positive, and add up to its mean."""
    parts = poisson["phases"]
    assert list(parts) == ["late_s", "before_engine_s", "engine_s", "after_engine_s"]
    assert all(part["mean"] > 0 for part in parts.values())
    assert sum(part["mean"] for part in parts.values()) == pytest.approx(
        poisson["first_token_s"]["mean"]
    )


def test_running_servers_get_the_same_requests(capsys, tmp_path):
    """A server that runs already answers the same client, beside this one's completions."""
    options = arguments(tmp_path)
    with (
        Runtime.from_pretrained(options[1], max_slots=2, max_context=64, progress=False) as rt,
        server(rt, model_name="other", max_waiting=100) as url,
    ):
        more = ["--connections", "3", "--repeats", "1", "--peer", f"peer={url},other"]
        assert main([*options, *more]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert set(point["ways"]) == {"in process", "socket", "http", "completions", "peer"}
    assert point["ways"]["peer"]["poisson"]["phases"] is None
    _check_phases(point["ways"]["completions"]["runs"][0]["poisson"])
    for way in ("completions", "peer"):
        theirs = point["ways"][way]
        assert theirs["at_once"]["tokens_per_s"] > 0
        assert theirs["poisson"]["first_token_s"]["p50"] > 0


def _peers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one server start, and the other end at once."""
    monkeypatch.setattr(Environment, "python", lambda _: Path(sys.executable))
    broken = folder / "broken.py"
    broken.write_text("raise SystemExit('it has no model')")
    scripts = {"fake": Path(__file__).with_name("fake_server.py"), "broken": broken}
    made = {
        name: PeerServer(str(script), Environment((name,)), {"extra": 1})
        for name, script in scripts.items()
    }
    monkeypatch.setattr(servers, "PEERS", made)


def test_servers_are_started_and_ended(capsys, tmp_path, monkeypatch):
    """They get the model in their formats; one that does not start fails alone, with its reason."""
    _peers(tmp_path, monkeypatch)
    more = ["--connections", "3", "--repeats", "1", "--compare", "broken,fake"]
    assert main([*arguments(tmp_path), *more]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    (point,) = result["points"]
    assert set(point["ways"]) == {"in process", "socket", "http", "completions", "fake"}
    assert point["ways"]["fake"]["at_once"]["tokens_per_s"] > 0
    assert result["peers"]["fake"]["startup_s"] > 0
    assert result["failed"] == {"broken": "the server ended with status 1"}
    assert "it has no model" in printed.err


def test_answers_of_another_length_do_not_count(monkeypatch):
    """A server that ends answers early is not measured."""

    def sent(*_: Any) -> Sequence[TimedAnswer]:
        return [TimedAnswer([0.1], 5, 0.2)]

    monkeypatch.setattr("benchmarks.http.ways.send", sent)
    items = random_items(1, num_prompt_tokens=3, num_output_tokens=6, vocab_size=9, seed=0)
    with pytest.raises(PeerError, match="answer 0 has 5 tokens in place of 6"):
        completions_of("http://127.0.0.1:1", "model")(items, [0.0])


def test_every_server_has_its_script_and_pinned_requirements():
    """pip installs only pinned versions."""
    for name, peer in PEERS.items():
        assert (SCRIPTS / peer.script).is_file(), name
        assert all("==" in each for each in peer.environment.requirements), name


@pytest.mark.parametrize("text", ["http://127.0.0.1:1", "vllm=127.0.0.1:1", "=http://a:1"])
def test_running_servers_need_a_name_and_an_address(capsys, text):
    """What is neither ends the command with a sentence."""
    with pytest.raises(SystemExit):
        main(["--peer", text])
    assert "pass NAME=http://HOST:PORT,MODEL" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused_first(capsys, tmp_path):
    """Unknown servers, folders and names that are taken are refused before a model is loaded."""
    (tmp_path / "config.json").touch()
    assert main(["--compare", "vlm"]) == 2
    assert "known are ['llamacpp', 'vllm']" in capsys.readouterr().err
    assert main(["--compare", "vllm", "--model", str(tmp_path)]) == 2
    assert "weights of a GGUF file" in capsys.readouterr().err
    assert main(["--connections", "1,x"]) == 2
    with pytest.raises(SystemExit):
        main(["--peer", "http=http://a:1"])
