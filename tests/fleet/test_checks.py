"""What a fleet's replicas must have."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.fleet.fleet import check_host_pages
from jaxserve.fleet.replica import Started
from jaxserve.models.families import config_from_hf
from jaxserve.testing.tiny import CONFIG

pytestmark = pytest.mark.fast


def _started(num_host_pages: int) -> Started:
    return Started(
        pid=1,
        host="here",
        max_context=100,
        max_length=100,
        max_prompt_tokens=99,
        model_config=config_from_hf(CONFIG),
        num_host_pages=num_host_pages,
    )


def test_roles_need_host_pages_on_both_sides():
    """One replica of each role must have some; without, every prompt would be computed twice."""
    some, none = _started(10), _started(0)
    check_host_pages([some, none], [none, some])
    with pytest.raises(InvalidConfigError, match="no 'prefill' replica"):
        check_host_pages([none], [some])
    with pytest.raises(InvalidConfigError, match="no 'decode' replica"):
        check_host_pages([some], [none, none])
