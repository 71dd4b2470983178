"""A timer of made-up layers, and the origin of their profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxserve.planning.layers import LayerOrigin, LayerProfile, LayerSizes
from jaxserve.planning.layers import profile as parts

SIZES = LayerSizes(max_tokens=256, max_batch=16, max_length=512)
NUM_DEVICES = 8


class MadeUpTimer:
    """Straight lines that all differ, shared by shards; a prompt costs with its square.

    Args:
      fails_after: points after which the next one raises KeyboardInterrupt; None for never.
      has_encoder: a decoder layer has cross attention, and so one more sum over shards.
    """

    def __init__(
        self,
        degrees: Sequence[int] = (1, 2),
        *,
        fails_after: int | None = None,
        sizes: LayerSizes = SIZES,
        has_encoder: bool = False,
    ):
        self.sizes = sizes
        self.degrees = degrees
        self.num_devices = NUM_DEVICES
        self.asked: list[tuple[str, int, int]] = []
        self._fails_after = fails_after
        self._num_sums = 3 if has_encoder else 2

    def seconds(self, part: str, degree: int, at: int) -> float:
        self._count(part, degree, at)
        if part == parts.PROMPT:
            return 0.5 + at**2 / 1000 / degree
        if part == parts.PROMPTS:
            return 0.5 + (self.sizes.max_tokens // at) * at**2 / 1000 / degree
        base, slope = {
            parts.LAUNCH: (0.5, 0.0),
            parts.REST: (1.5 + self._num_sums * 0.25 * (degree > 1), 0.5 / degree),
            parts.ENCODE: (1.25 + 2 * 0.25 * (degree > 1), 0.375 / degree),
            parts.JOIN: (0.75, 0.125 / degree),
            parts.SUMS: (0.5 + 0.25, 0.0),
            parts.HEAD: (1.0, 0.25 / degree),
            parts.HANDOFF: (0.125, 0.0625),
            parts.HANDOVER: (0.25, 0.125),
            parts.BUSY: (2.0, 1.0),
        }[part]
        return base + slope * at

    def batch_s(self, part: str, degree: int, batch: int, length: int) -> float:
        self._count(part, degree, batch)
        each_s = {parts.DECODE: 1 + length / 100, parts.CROSS: 2 + length / 200}[part]
        return 0.5 + batch * each_s / degree

    def _count(self, part: str, degree: int, at: int) -> None:
        if self._fails_after is not None and len(self.asked) >= self._fails_after:
            raise KeyboardInterrupt
        self.asked.append((part, degree, at))


def made_up_profile(path: Any = None, *, has_encoder: bool = False, **device: Any) -> LayerProfile:
    """Return an empty profile of made-up layers; `device` replaces fields of the origin's."""
    origin = LayerOrigin(
        model={"num_layers": 4, "decoder_start_token_id": 0 if has_encoder else None},
        device={"platform": "cpu", "kind": "abacus", "count": NUM_DEVICES},
        sizes=asdict(SIZES),
        versions={"jax": "0"},
    )
    return LayerProfile(replace(origin, device={**origin.device, **device}), path=path)
