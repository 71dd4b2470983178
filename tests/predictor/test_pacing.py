"""Learning takes at most its share of the time, on a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.predictor.online import Budget

pytestmark = pytest.mark.fast


def _play(share: float, costs_s: list[float], end_s: float, said: float = 1.0) -> list[float]:
    """Return when each piece of work began; its announced cost is `said` times the real one."""
    budget, now_s, begun = Budget(share, at_s=0.0), 0.0, []
    for cost_s in costs_s:
        now_s += budget.wait_s(now_s, said * cost_s)
        if now_s > end_s:
            break
        assert budget.wait_s(now_s, said * cost_s) == pytest.approx(0.0, abs=1e-9)
        begun.append(now_s)
        budget = budget.spent(now_s, cost_s)
        now_s += cost_s
    return begun


@pytest.mark.parametrize("seed", range(5))
def test_never_over_its_share(seed):
    """At every time the work done is within the share of the elapsed time."""
    random = np.random.default_rng(seed)
    share = float(random.uniform(0.005, 0.9))
    costs_s = random.uniform(0.001, 2.0, 500).tolist()
    begun = _play(share, costs_s, end_s=1e9)
    ends_s = np.asarray(begun) + costs_s
    assert (np.cumsum(costs_s) <= share * ends_s + 1e-6).all(), seed
    # The share is also used: earned time is not lost.
    assert sum(costs_s) > 0.9 * share * begun[-1] - 2.0


def test_work_that_takes_longer_than_said_is_waited_for():
    """At twice the announced cost the overrun is paid before the next piece, within the share."""
    costs_s = [0.1] * 200
    begun = _play(0.01, costs_s, end_s=1e9, said=0.5)
    spent_s = np.cumsum(costs_s)
    assert (spent_s[:-1] <= 0.01 * np.asarray(begun[1:]) + 0.05 + 1e-6).all()


def test_idle_time_is_not_saved_up():
    """After an idle hour one second is available; a more expensive piece may still begin."""
    budget = Budget(0.01, at_s=0.0, most_s=1.0)
    after = budget.spent(3600.0, 0.9)
    assert after.wait_s(3600.9, 0.2) == pytest.approx((0.2 - 0.1) / 0.01, rel=0.1)
    assert budget.wait_s(3600.0, 5.0) == 0.0
    assert budget.wait_s(0.0, 5.0) == pytest.approx(500.0)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_what_is_no_share(share):
    """Shares are above 0 and at most 1."""
    with pytest.raises(ValueError, match="over 0, at most 1"):
        Budget(share, at_s=0.0)
