"""A timeline that computes each configuration once, for several searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import final

import numpy as np

from jaxserve.planning.schedules.configuration import Layout, Points, Schedule
from jaxserve.planning.schedules.estimates import Best, Estimates
from jaxserve.planning.schedules.timeline import Boxes, Timeline


@final
class RememberedTimeline:
    """A `Timeline` with the figures of another one, each computed when it is first asked for.

    Searches with different scores halve the same boxes, so later ones compute little.
    """

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._points: dict[tuple[int, ...], np.ndarray] = {}
        self._boxes: dict[tuple[int, ...], np.ndarray] = {}

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return self._timeline.layouts

    @property
    def max_encode_batch(self) -> int:
        return self._timeline.max_encode_batch

    @property
    def max_control(self) -> int:
        return self._timeline.max_control

    def estimate(self, points: Points) -> Estimates:
        def computed(which: np.ndarray) -> np.ndarray:
            return _table(self._timeline.estimate(points[which]))

        return Estimates(**_columns(Estimates, _known(self._points, _keys(points), computed)))

    def boxes(self) -> Boxes:
        return self._timeline.boxes()

    def bound(self, boxes: Boxes) -> Best:
        def computed(which: np.ndarray) -> np.ndarray:
            return _table(self._timeline.bound(boxes[which]))

        keys = [
            (*low, *high) for low, high in zip(_keys(boxes.low), _keys(boxes.high), strict=True)
        ]
        return Best(**_columns(Best, _known(self._boxes, keys, computed)))

    def schedule(self, point: Points) -> Schedule:
        return self._timeline.schedule(point)


def _keys(points: Points) -> list[tuple[int, ...]]:
    parts = points.layout.tolist(), points.encode_batch.tolist(), points.control.tolist()
    return list(zip(*parts, strict=True))


def _known(
    rows: dict[tuple[int, ...], np.ndarray],
    keys: Sequence[tuple[int, ...]],
    computed: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return the row of each key [keys, figures]; compute and remember those that are missing."""
    missing = [index for index, key in enumerate(keys) if key not in rows]
    if missing:
        for index, row in zip(missing, computed(np.array(missing)), strict=True):
            rows[keys[index]] = row
    return np.array([rows[key] for key in keys])


def _table(figures: Estimates | Best) -> np.ndarray:
    """Return figures as floats [configurations, figures]."""
    return np.stack([np.asarray(getattr(figures, f.name), float) for f in fields(figures)], axis=1)


def _columns(kind: type[Estimates] | type[Best], rows: np.ndarray) -> dict[str, np.ndarray]:
    columns = {f.name: rows[:, i] for i, f in enumerate(fields(kind))}
    return columns | {"fits": columns["fits"] > 0}
