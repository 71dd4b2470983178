"""The Pensieve thesis's figures, simulated on a few conversations."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common import sweep
from benchmarks.common.sweep import STATELESS
from benchmarks.pensieve import (
    FACTOR,
    MACHINES,
    PANELS,
    beginning,
    cost_of,
    curve_of,
    figures,
    main,
    panels_of,
)
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.conversations import Talk, UserTurn

pytestmark = pytest.mark.release


def _talks(count: int) -> list[Talk]:
    """Return long histories, each of which begins a second after the previous one."""
    rng = np.random.default_rng(0)
    return [
        Talk(
            turns=tuple(
                UserTurn(
                    token_ids=tuple(rng.integers(1, 1000, 400).tolist()),
                    num_output_tokens=int(rng.integers(5, 60)),
                    reaction_s=float(rng.exponential()),
                )
                for _ in range(int(rng.integers(1, 8)))
            ),
            arrival_s=float(number),
        )
        for number in range(count)
    ]


def _options(*more: str):
    short = ["--seconds", "60", "--warm-up", "10"]
    return main.parser().parse_args([*short, *more])


def test_models_need_the_memory_that_their_heads_say():
    """A 13B model takes 0.78 MB a token (section 3.3.2), and 1/4 or 1/8 with grouped heads."""
    options = _options()
    costs = {name: cost_of(options, name) for name in MACHINES}
    kv = {name: cost.model.kv_bytes_per_token for name, cost in costs.items()}
    assert kv["OPT-13B"] == pytest.approx(0.78 * 2**20, rel=0.01)
    assert kv["Llama 2-13B"] == kv["OPT-13B"] / 4
    assert kv["Llama 2-70B"] == 2 * 2 * 80 * 8 * 128
    for name, machine in MACHINES.items():
        cost, config = costs[name], machine.config(costs[name])
        pool_bytes = (config.num_pages - 1) * cost.page_bytes
        assert pool_bytes == pytest.approx(40e9 * machine.num_gpus, rel=0.001)
        assert config.num_host_pages > 5 * config.num_pages
        assert cost.kv_tokens * cost.model.kv_bytes_per_token > pool_bytes


def test_kept_histories_make_answers_faster():
    """Stateless serving computes every history again; the host holds what the device cannot."""
    talks = beginning(_talks(400), 4.0, 5.0, 60.0)
    panel = PANELS[0]
    found = {
        name: figures(panel, name, talks, _options())
        for name in (STATELESS, "pensieve_device_only", "pensieve")
    }
    p90 = {name: each["normalised_latency_s"]["p90"] for name, each in found.items()}
    assert p90["pensieve"] < p90[STATELESS]
    hits = {name: each["engine"]["num_prefix_hit"] for name, each in found.items()}
    assert hits[STATELESS] == 0
    assert hits["pensieve_device_only"] < hits["pensieve"]
    assert all(each["num_failed"] == 0 for each in found.values())


def test_throughput_at_the_bound_lies_on_the_line():
    """The throughput is interpolated between two points; None if none is beyond the bound."""
    points = [
        {"requests_per_s": served, "normalised_latency_s": {"p90": p90}}
        for served, p90 in ((1.0, 0.1), (2.0, 0.15), (2.5, 0.35))
    ]
    assert sweep.served_at(points, 0.2) == pytest.approx(2.125)
    assert sweep.served_at(points, 0.05) is None
    assert sweep.served_at(points[:2], 0.2) is None


def test_a_curve_ends_beyond_the_bound():
    """Rates rise by a factor; one more is between the last two; no rate is far too high."""

    def at(rate: float):
        return {"rate": rate, "requests_per_s": rate, "normalised_latency_s": {"p90": rate / 10}}

    curve = curve_of(at, 1.0, 100.0, 0.2)
    rates = [point["rate"] for point in curve.points]
    assert rates[:2] == [1.0, FACTOR] and rates == sorted(rates)
    assert rates[-1] > 2.0 >= rates[-3] and rates[-1] / rates[-2] == pytest.approx(FACTOR**0.5)
    assert curve.stopped_by == "bound"
    assert sweep.served_at(curve.points, 0.2) == pytest.approx(2.0)
    few = curve_of(at, 1.0, 1.5, 0.2)
    assert [point["rate"] for point in few.points] == rates[:2]
    assert few.stopped_by == "number of conversations"


def test_gains_are_over_stateless_serving_of_the_same_conversations():
    """Gains compare runs with the same reaction time; without such a run there is no gain."""

    def curve(at_bound: float) -> sweep.Curve:
        rates = (at_bound - 1, at_bound + 1)
        return sweep.Curve(
            [{"requests_per_s": r, "normalised_latency_s": {"p90": r - at_bound}} for r in rates]
        )

    both = sweep.at_bound({STATELESS: curve(2.0), "pensieve": curve(3.0)}, 0.0)
    assert [each["requests_per_s_at_bound"] for each in both.values()] == [2.0, 3.0]
    assert [each["of_stateless"] for each in both.values()] == [1.0, 1.5]
    assert sweep.at_bound({"pensieve": curve(3.0)}, 0.0)["pensieve"]["of_stateless"] is None


def test_refuses_figures_that_there_are_not():
    """The error lists the figures that exist."""
    with pytest.raises(InvalidConfigError, match="3.12,3.13,3.14,3.15,3.16"):
        panels_of(_options("--figures", "3.17"))
