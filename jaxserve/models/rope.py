"""Rotary position embeddings, in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.kernels import RopeTables, dispatch, matmul

# The field of a GGUF file's own factor of sines and cosines, in addition to config.json's fields.
MAGNITUDE = "gguf_attn_factor"
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@final
@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A way to stretch rotary frequencies beyond the trained context; hashable.

    `low_freq_factor` and `high_freq_factor` belong to llama3, `beta_fast`, `beta_slow` and
    `truncate` to yarn; `short_factors`, `long_factors` and `is_long` to longrope, which has a
    factor for each frequency; `original_max_position_embeddings` to all three. Sines and cosines
    are multiplied by `attention_factor`, which differs from 1 in folders for yarn and longrope
    only.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0  # the part of the frequencies that proportional does not set to zero
    is_long: bool = False  # whether `long_factors` are used, at all positions

    @classmethod
    def from_hf(cls, given: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling | None:
        """Read a config.json's scaling or None; raise UnsupportedModelError if unknown."""
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "mrope":  # positions of images; those of text are plain
            kind = "default"
        if kind not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"RoPE scaling {kind!r} is not supported; supported are {SUPPORTED_ROPE_TYPES}"
            )
        magnitude = float(given.get(MAGNITUDE, 1.0))
        if kind == "default" or (kind == "linear" and given.get("factor") == magnitude == 1):
            return None
        original = given.get("original_max_position_embeddings") or max_position_embeddings
        factor = given.get("factor", 1.0 if kind == "proportional" else None)
        if factor is None and kind in ("yarn", "longrope"):
            factor = max_position_embeddings / original
        missing = [name for name in _NEEDED.get(kind, ()) if name not in given]
        if factor is None or missing:
            raise UnsupportedModelError(
                f"RoPE scaling {kind!r} lacks {missing or ['factor']} in config.json: {dict(given)}"
            )
        return cls(
            kind=kind,
            factor=float(factor),
            original_max_position_embeddings=int(original),
            low_freq_factor=float(given.get("low_freq_factor", 1.0)),
            high_freq_factor=float(given.get("high_freq_factor", 4.0)),
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            attention_factor=magnitude * _attention_factor(kind, given, factor, original),
            truncate=bool(given.get("truncate", True)),
            short_factors=tuple(map(float, given.get("short_factor") or ())),
            long_factors=tuple(map(float, given.get("long_factor") or ())),
            share=float(given.get("partial_rotary_factor", 1.0)) if kind == "proportional" else 1.0,
            is_long=kind == "longrope" and max_position_embeddings > original,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    # Number of rotated dimensions of a head, from the first one on; None for all.
    dim: int | None = None

    @classmethod
    def from_hf(
        cls, given: Mapping[str, Any], max_position_embeddings: int, dim: int | None = None
    ) -> Rope:
        """Read the result of `rope_fields`, or raise UnsupportedModelError."""
        theta = given["rope_theta"]
        if not isinstance(theta, int | float) or not theta > 0:
            raise UnsupportedModelError(f"rope_theta={theta!r} is not supported; give a number > 0")
        return cls(
            theta=float(theta), scaling=RopeScaling.from_hf(given, max_position_embeddings), dim=dim
        )

    def longest_context(self, max_position_embeddings: int) -> int:
        """Return the number of positions in a config.json, extended by the scaling.

        As in vLLM: yarn stretches the original context, linear scaling the stated one; for
        the others the stated one is already extended. transformers has no limit.
        """
        if self.scaling is None or self.scaling.kind in _STATED:
            return max_position_embeddings
        is_yarn = self.scaling.kind == "yarn"
        before = (
            self.scaling.original_max_position_embeddings if is_yarn else max_position_embeddings
        )
        return max(max_position_embeddings, int(before * self.scaling.factor))

    @property
    def num_factors(self) -> int | None:
        """Number of longrope's factors, -1 if short and long ones differ; None without any."""
        if self.scaling is None or self.scaling.kind != "longrope":
            return None
        counts = {len(self.scaling.short_factors), len(self.scaling.long_factors)}
        return counts.pop() if len(counts) == 1 else -1

    def for_context(self, max_context: int) -> Rope:
        """Return the embedding of sequences of at most `max_context` tokens.

        longrope has its long factors at all positions if that is more than the original context,
        and else its short ones, so that keys in the cache never change their rotation.
        """
        if self.scaling is None or self.scaling.kind != "longrope":
            return self
        is_long = max_context > self.scaling.original_max_position_embeddings
        return replace(self, scaling=replace(self.scaling, is_long=is_long))


def rope_fields(given: Mapping[str, Any], *, theta: str = "rope_theta") -> dict[str, Any]:
    """Return the fields of a config.json about rotary embeddings, as transformers 5 writes them.

    transformers 5 has `rope_parameters`; 4 has `rope_scaling`, which is used if both are given,
    and a field for theta.
    """
    return {"rope_theta": given[theta], **(given["rope_scaling"] or given["rope_parameters"] or {})}


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, " half"]:
    """Return the frequencies in radians per position; `half` is head_dim / 2.

    llama3 as in Llama 3.1's release; yarn as in Peng et al., "YaRN" (arXiv:2309.00071), section 3;
    longrope as in Ding et al., "LongRoPE" (arXiv:2402.13753), section 3.
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "proportional":
        rotated = int(scaling.share * head_dim // 2)
        frequencies[rotated:] = 0
        return frequencies / scaling.factor
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        return frequencies / np.asarray(
            scaling.long_factors if scaling.is_long else scaling.short_factors
        )
    original = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = original * frequencies / (2 * np.pi)
        # Llama 4 has equal borders.
        kept = turns > low if low == high else np.clip((turns - low) / (high - low), 0.0, 1.0)
    else:

        def dimension_of(rotations: float) -> float:
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001
        kept = 1.0 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rope_tables(positions: Int32[Array, " tokens"], head_dim: int, rope: Rope) -> RopeTables:
    """Return cosines and sines of `positions`, float32 [tokens, rotated / 2]."""
    dim = rope.dim or head_dim
    frequencies = jnp.asarray(inverse_frequencies(dim, rope.theta, rope.scaling), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    both = _computed_once(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1) * factor)
    return both[:, : dim // 2], both[:, dim // 2 :]


def _computed_once(x: Float32[Array, "tokens columns"]) -> Float32[Array, "tokens columns"]:
    """Return `x` from an operation that XLA does not fuse with its users.

    On the CPU, XLA would compute the sines again for every head of every layer, a tenth of a decode
    step, and it drops `lax.optimization_barrier` before it fuses. The product with ones and zeros
    is exact.
    """
    return matmul(x, jnp.eye(x.shape[1])) if dispatch.target_platform() == "cpu" else x


# Scalings of models whose max_position_embeddings is that after the scaling.
_STATED = ("llama3", "longrope", "proportional")
# Fields of a scaling that have no default.
_NEEDED = MappingProxyType(
    {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
)


def _attention_factor(kind: str, given: Mapping[str, Any], factor: float, original: int) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if kind not in ("yarn", "longrope"):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if given.get("mscale") and given.get("mscale_all_dim"):
        return magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return magnitude(1.0)
