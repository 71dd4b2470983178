"""The result of a step's write into the cache."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Real

# The rotated queries; the pages of keys and of values; their scales, None without 8-bit pages.
Written = tuple[
    Float[Array, "tokens q_heads head_dim"],
    Real[Array, "layers pages kv_heads page_size head_dim"],
    Real[Array, "layers pages kv_heads page_size head_dim"],
    Float32[Array, "layers pages kv_heads page_size"] | None,
    Float32[Array, "layers pages kv_heads page_size"] | None,
]
