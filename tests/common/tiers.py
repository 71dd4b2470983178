"""The tiers of tests: what only `make test-all` runs has the marker `release`.

Hypothesis draws more examples there, too: it passes `--hypothesis-profile=release`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

RELEASE_EXAMPLES = 250
settings.register_profile("test", max_examples=20, deadline=None)
settings.register_profile("release", max_examples=RELEASE_EXAMPLES, deadline=None)


def some(values: Iterable[Any], *kept: int, are_tuples: bool = False) -> list[Any]:
    """Return values to parametrize with: `make test` runs those at the indices `kept`.

    `make test-all` runs all of them. Without `kept`, `make test` runs the first one.

    Args:
      are_tuples: each value is a tuple for one argument, and not one value for each of several.
    """
    kept = kept or (0,)
    params = (pytest.param(value) if are_tuples else value for value in values)
    return [value if i in kept else _in_release(value) for i, value in enumerate(params)]


def seeds(num: int, num_kept: int = 20) -> pytest.MarkDecorator:
    """Parametrize a test with `seeds`, a range to loop over.

    `make test` runs the first `num_kept` seeds. `make test-all` runs all `num` in one test, too, so
    that what a test counts is enough.
    """
    ranges = [range(num_kept), range(num)]
    return pytest.mark.parametrize("seeds", some(ranges), ids=lambda r: f"{r.start}-{r.stop}")


def examples(num: int, num_in_release: int) -> settings:
    """Draw `num` examples, always the same: for tests that compile each one, or write files."""
    is_release = settings.default.max_examples == RELEASE_EXAMPLES
    most = num_in_release if is_release else num
    return settings(max_examples=most, deadline=None, derandomize=True)


def _in_release(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=(*value.marks, pytest.mark.release), id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.release)
