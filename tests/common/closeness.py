"""Whether arrays are close: the relative norm of their difference."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def assert_close(got: ArrayLike, wanted: ArrayLike, allowed: float = 1e-5) -> None:
    """Compare arrays of one shape by the norm of their difference, relative to the wanted one's."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.linalg.norm(got - wanted) <= allowed * np.linalg.norm(wanted)
