"""The public signature of a step's write into the paged cache, and what serves it."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax

from pallas_kernels import dispatch
from pallas_kernels.kv_write import reference, triton, xla
from pallas_kernels.kv_write.rotary import RopeTables

Implementation = Literal["reference", "xla", "triton", "triton_interpreted"]

_IMPLEMENTATIONS = {
    "reference": reference.rotate_and_write,
    "xla": xla.rotate_and_write,
    "triton": triton.rotate_and_write,
    "triton_interpreted": partial(triton.rotate_and_write, interpret=True),
}
_PREFERRED = {"cuda": ("triton",)}

IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)


def rotate_and_write(
    qkv: jax.Array,
    tables: RopeTables | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: int | jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Rotate a step's queries and keys, and write its keys and values into the paged cache.

    The cache is updated in place when it is donated. Rotation is in float32.

    Args:
      qkv: [tokens, kv_heads, group + 2, head_dim], of each KV head its queries, its key, its value.
      tables: cosines and sines of the tokens' positions, float32 [tokens, rotated / 2] each, for
        the first `rotated` dimensions of a head; None where nothing is rotated.
      k_pages, v_pages: [layers, pages, kv_heads, page_size, head_dim].
      layer: which layer of the cache; may be traced.
      page, offset: int32 [tokens], where each token goes: places inside the cache, each at most
        once but those of page 0, the null page (padding), whose content is undefined.
      k_scales, v_scales: float32 [layers, pages, kv_heads, page_size], of pages in eight bits (see
        `quantize`), written with them; both or none.
      implementation: overrides the platform's choice, made when the call is traced and logged
        once: "triton" on NVIDIA GPUs, "xla" elsewhere and where it refuses. "triton_interpreted"
        runs that kernel anywhere, for tests.

    Returns:
      Queries [tokens, kv_heads * group, head_dim] in qkv's dtype, and `k_pages`, `v_pages`,
      `k_scales` and `v_scales` with the tokens written.

    Raises:
      NotImplementedError: the implementation asked for cannot serve this case; says why.
      ValueError: the shapes contradict each other, or the implementation is unknown.
    """
    _check_shapes(qkv, tables, k_pages, v_pages, page, offset)
    for scales in (k_scales, v_scales):
        if (scales is None) != (k_scales is None) or (
            scales is not None and scales.shape != k_pages.shape[:4]
        ):
            raise ValueError(f"scales: expected both or none, of {k_pages.shape[:4]}")
    return dispatch.call(
        "rotate_and_write",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        qkv=qkv,
        tables=tables,
        k_pages=k_pages,
        v_pages=v_pages,
        layer=layer,
        page=page,
        offset=offset,
        k_scales=k_scales,
        v_scales=v_scales,
    )


def _check_shapes(
    qkv: jax.Array,
    tables: RopeTables | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    offset: jax.Array,
) -> None:
    if (
        qkv.ndim != 4
        or qkv.shape[2] < 3
        or k_pages.ndim != 5
        or k_pages.shape != v_pages.shape
        or (k_pages.shape[2], k_pages.shape[4]) != (qkv.shape[1], qkv.shape[3])
    ):
        raise ValueError(
            f"qkv{qkv.shape}, k_pages{k_pages.shape}, v_pages{v_pages.shape}: expected "
            "[tokens, kv_heads, group + 2, head_dim] and twice "
            "[layers, pages, kv_heads, page_size, head_dim]"
        )
    if {page.shape, offset.shape} != {qkv.shape[:1]}:
        raise ValueError(
            f"page{page.shape} and offset{offset.shape}: expected one of {qkv.shape[0]} tokens"
        )
    for table in tables or ():
        if table.shape[:1] != qkv.shape[:1] or 2 * table.shape[1] > qkv.shape[3]:
            raise ValueError(
                f"a table{table.shape} for qkv{qkv.shape}: expected [tokens, rotated / 2], and no "
                "more rotated than head_dim"
            )
