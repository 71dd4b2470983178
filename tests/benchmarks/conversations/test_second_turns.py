"""Second turns begin with the state of the first, and are compared with two other ways."""

from __future__ import annotations

import json

import pytest

from benchmarks.conversations.second_turns import WAYS, main

pytestmark = pytest.mark.release


def test_every_way_is_measured(capsys):
    """A run fails unless exactly one way begins with a kept state."""
    assert main(["--lengths", "40,100", "--layers", "3", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["length"] for row in result["rows"]] == [40, 100]
    for row in result["rows"]:
        assert all(row[way]["first_token_s"] > 0 for way in WAYS)
        assert row["kept_over_alone"] > 0
