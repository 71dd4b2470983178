"""The picture of a frontier."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.planning.schedules import LatencyBounds
from jaxserve.planning.schedules.frontier import ClusterSearch, frontier_of
from jaxserve.report import draw_frontier
from tests.planning.schedules.made_up import random_case

pytestmark = pytest.mark.fast


@pytest.mark.release
def test_the_chosen_schedules_are_marked_with_their_figures():
    """Each bound has a line and a label, and the policies that occur are in the legend."""
    deployment, lengths = random_case(np.random.default_rng(3))
    schedules = ClusterSearch(deployment, lengths)
    frontier = frontier_of(schedules, num_bounds=5)
    asked = (frontier.points[1][0], math.inf)
    chosen = {bound_s: schedules.best(LatencyBounds(latency_s=bound_s)) for bound_s in asked}
    picture = draw_frontier(frontier, chosen, title="a model")
    (axes,) = picture.figure.axes
    labels = [text.get_text() for text in axes.texts]
    assert len(labels) == 2
    assert f"bound {asked[0]:.3g} s" in labels[0] and "no bound" in labels[1]
    assert f"{float(chosen[math.inf].estimates.throughput):.3g} answers/s" in labels[1]
    policies = {outcome.policy for _, outcome in frontier.points}
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len([text for text in legend if text.startswith("best, ")]) == len(policies)
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert draw_frontier(frontier)._repr_png_().startswith(b"\x89PNG")
