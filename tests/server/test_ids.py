"""Ids of requests and answers."""

from __future__ import annotations

import re

from jaxserve.server.ids import new_id


def test_ids_are_unique():
    """Each id has its prefix and 32 hexadecimal digits, and none comes again."""
    ids = [new_id("req") for _ in range(10_000)]
    assert all(re.fullmatch("req-[0-9a-f]{32}", each) for each in ids)
    assert len(set(ids)) == len(ids)
