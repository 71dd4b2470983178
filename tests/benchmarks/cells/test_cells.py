"""The benchmark of cells: its arithmetic beside runs that were worked out by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.cells import contenders
from benchmarks.cells.__main__ import capacity, main
from benchmarks.cells.applications import (
    APPLICATIONS,
    SIZES,
    WORKLOADS,
    CellRequest,
    requests_of,
    simulated,
)
from benchmarks.cells.contenders import ThesisCost, products
from benchmarks.cells.peers.options import max_batch_of, peers_of
from benchmarks.cells.peers.replay import Queue, play
from benchmarks.cells.playing import Served, compared, figures_of, is_saturated, peaks_of, simulate
from jaxserve.cells import BatchMaker
from jaxserve.cells.policies import GraphMerging, Padding
from jaxserve.core.errors import InvalidConfigError
from tests.cells.examples import OneSecond

pytestmark = pytest.mark.release

# Figure 2.5: requests 1 to 4 arrive at 0; its text does not say when the others do, and gives the
# lengths of the first four, and 7 for the longest of the others.
LENGTHS = (2, 3, 3, 5, 5, 7, 3, 1)
ARRIVALS = [0.0] * 4 + [1.5] * 4


def _figure_2_5(policy, max_in_flight=1):
    requests = [CellRequest((1,) * length) for length in LENGTHS]
    model = simulated("lstm", {"lstm": (1, 2, 4)})
    return simulate(
        model, policy, OneSecond(), requests, ARRIVALS, max_in_flight=max_in_flight, warm_share=0.0
    )


def test_cellular_batching_of_figure_2_5():
    """Requests leave at 2, 3, 3, 5, 7, 10, 6 and 6 s, and start at 0, 2, 3, 3 and 5 s."""
    found = _figure_2_5(BatchMaker(max_tasks_to_submit=1))
    assert found["latency_s"]["mean"] == pytest.approx((2 + 3 + 3 + 5 + 5.5 + 8.5 + 4.5 + 4.5) / 8)
    assert found["queueing_s"]["mean"] == pytest.approx((0.5 + 1.5 + 1.5 + 3.5) / 8)
    assert found["computing_s"]["mean"] == pytest.approx((2 + 3 + 3 + 5 + 5 + 7 + 3 + 1) / 8)
    assert found["num_nodes"] == 29 and found["num_padding"] == 0


@pytest.mark.parametrize(
    "policy", [GraphMerging(max_graphs=4), Padding(bucket_width=400, to_longest=True)]
)
def test_graph_batching_of_figure_2_5(policy):
    """The first four leave at 5 s, and the others start then and leave at 12 s."""
    found = _figure_2_5(policy)
    assert found["latency_s"]["mean"] == pytest.approx((4 * 5 + 4 * 10.5) / 8)
    assert found["queueing_s"]["p99"] == pytest.approx(3.5)
    assert found["computing_s"]["mean"] == pytest.approx((5 + 7) / 2)


def test_figures_leave_the_beginning_out():
    """Rates count what ends between the first counted arrival and the last one."""
    served = [Served(float(i), i + 0.5, i + 2.0) for i in range(10)]
    found = figures_of(served)
    # Counted from request 2 on: those that arrived at 1 to 7 ended in (2, 9].
    assert found["requests_per_s"] == pytest.approx(7 / 7)
    assert found["latency_s"]["p50"] == 2.0 and found["queueing_s"]["p99"] == 0.5
    assert found["quantiles"] == {"queueing_s": [0.5] * 21, "computing_s": [1.5] * 21}
    at_once = [Served(0.0, 0.0, end_s) for end_s in (1.0, 2.0, 4.0)]
    assert figures_of(at_once)["requests_per_s"] == pytest.approx(3 / 4)


def test_policies_are_compared_at_moderate_load():
    """Peaks, ratios, and p90 at the highest rate of at most half of the other's peak."""
    points = [
        {"policy": policy, "rate": rate, "requests_per_s": served, "latency_s": {"p90": p90}}
        for policy, rate, served, p90 in [
            ("ours", 1.0, 1.0, 2.0),
            ("ours", 4.0, 4.0, 3.0),
            ("ours", 8.0, 7.0, 9.0),
            ("other", 1.0, 1.0, 5.0),
            ("other", 4.0, 3.5, 30.0),
            ("slow", 1.0, 0.8, 50.0),
            ("ours", None, 6.0, 1.0),
        ]
    ]
    found = compared(points, "ours", without=["slow"])
    assert found["best"] == "other" and found["peak_over"]["other"] == 2.0
    assert found["p90_lower_by"] == {"other": pytest.approx(0.6), "slow": None}
    # p90 latencies within 4 s: ours at rates 1 and 4, and all at once; the others never.
    assert peaks_of(points, 4.0) == {"ours": 6.0, "other": 0.0, "slow": 0.0}
    assert found["peaks_within_per_s"] == {"ours": 0.0, "other": 0.0, "slow": 0.0}
    assert found["within_over"] == {"other": None, "slow": None}
    assert [is_saturated(point) for point in points] == [
        False,
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_costs_are_those_of_the_thesis():
    """Its two points of an LSTM step, and its two of gathering and scheduling."""
    flops = products(SIZES["thesis"])
    bare, gathered = ThesisCost(flops, False), ThesisCost(flops, True)
    for batch, bare_s, gathered_s in ((64, 185e-6, 250e-6), (512, 784e-6, 784e-6 / 0.87)):
        assert bare.task_s("lstm", batch) == pytest.approx(bare_s)
        assert gathered.task_s("lstm", batch) == pytest.approx(gathered_s)
    # 24 words at 512 rows: 27,136 requests a second in the thesis, from 53 whole batches.
    requests = [CellRequest((1,) * 24)] * 3
    assert capacity(requests, bare, SIZES["thesis"]) == pytest.approx(27136, rel=0.01)


@pytest.mark.parametrize("workload", [*APPLICATIONS, "seq2seq_2_devices", "treelstm_batch_64"])
def test_a_sweep_of_workloads(workload, tmp_path, capsys):
    """Every policy plays, and each policy's nodes are those of the requests."""
    path = tmp_path / "result.json"
    application = WORKLOADS[workload].application
    arguments = ["--applications", workload, "--num-requests", "40", "--shares", "0.3"]
    assert main([*arguments, "--longest", "40", "--output", str(path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(path.read_text()) and not result["failed"]
    at_once = [point["policy"] for point in result["points"] if point["rate"] is None]
    assert at_once == list(contenders.contenders_of(application))
    points = {point["policy"]: point for point in result["points"] if point["rate"]}
    assert points.keys() == set(contenders.contenders_of(application))
    (entry,) = result["compared"]
    assert entry["peak_over"].keys() == points.keys() - {"batchmaker"}
    nodes = {name: point["num_nodes"] for name, point in points.items()}
    least = min(nodes.values())
    # A loop's end is learned late, so policies may run some steps of it that count for nothing.
    assert application == "seq2seq" or set(nodes.values()) == {least}


def test_a_spent_budget_skips_runs(capsys):
    """No run begins after the budget, and what is left out is named."""
    assert main(["--applications", "lstm", "--num-requests", "10", "--budget", "0"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["points"] == [] and len(result["skipped"]) == 1


def test_requests_have_what_policies_must_not_know():
    """Answers of Seq2Seq have lengths within the most steps, and trees have their words."""
    requests = requests_of("seq2seq", [3, 20, 7], vocab_size=50, seed=1)
    assert all(1 <= one.num_output_tokens <= one.max_steps for one in requests)
    assert requests[1].counts()["encoder"] == 20
    trees = requests_of("treelstm", [3, 20], vocab_size=50, seed=1)
    assert [one.counts() for one in trees] == [
        {"leaf": 3, "internal": 2},
        {"leaf": 20, "internal": 19},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--applications", "cnn"],
        ["--policies", "fastest"],
        ["--compare", "fastest"],
        ["--costs", "none"],
        ["--num-requests", "0"],
        ["--shares", "0.1,much"],
    ],
)
def test_options_are_checked(arguments, capsys):
    """What is unknown or asks for nothing is refused with exit code 2."""
    assert main(arguments) == 2
    assert "InvalidConfigError" in capsys.readouterr().err


def test_peers_have_the_largest_batch_of_the_application():
    """The cells of other applications do not limit it."""
    lstm, seq2seq = CellRequest((1, 2)), CellRequest((1, 2), None, 3)
    assert max_batch_of([lstm], SIZES["thesis"]) == 512
    assert max_batch_of([seq2seq], SIZES["thesis"]) == 256


def test_names_of_peers_and_groups():
    """A group stands for its members; names are checked."""

    class Options:
        compare = "torch,dynet"

    assert list(peers_of(Options)) == ["torch_packed", "torch_padded", "dynet"]
    with pytest.raises(InvalidConfigError):
        contenders.policy_of("fastest", cell_s={})


def test_peers_serve_what_has_arrived():
    """A peer's loop runs batches of its queue, and every request once."""
    batches = []
    times = play([0.0, 0.0, 0.0, 0.001], Queue(2), batches.append)
    assert sorted(sum(batches, [])) == [0, 1, 2, 3] and max(map(len, batches)) <= 2
    assert all(begin <= end for begin, end in times)
    queue = Queue(2, [1, 12, 2, 25, 11], width=10)
    for number in range(5):
        queue.add(number)
    assert [queue.take() for _ in range(4)] == [[0, 2], [1, 4], [3], []]
