"""The host's work without a device is that of the runtime."""

from __future__ import annotations

import json

import pytest

from benchmarks.cells.applications import APPLICATIONS, requests_of, simulated
from benchmarks.cells.host import main, measure

pytestmark = pytest.mark.release


@pytest.mark.parametrize("application", APPLICATIONS)
def test_every_request_ends(application):
    """Each application is served to its end, and its seconds add up."""
    requests = requests_of(application, [3, 1, 7, 2], vocab_size=9, seed=0)
    names = ["lstm", "encoder", "decoder", "leaf", "internal"]
    sizes = dict.fromkeys(names, (1, 4))
    found = measure(simulated(application, sizes), requests)
    seconds = found["unfolding_s"] + found["serving_s"]
    assert found["requests_per_s"] == pytest.approx(len(requests) / seconds, rel=1e-3)
    assert found["scheduled_per_s"] > found["nodes_per_s"] > 0


def test_it_prints_a_point_for_each_application(capsys):
    """One JSON object."""
    assert main(["--num-requests", "2", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [point["application"] for point in result["points"]] == list(APPLICATIONS)
