"""The public signature of a step's write into the cache, and the choice of its implementation."""

from __future__ import annotations

from typing import Literal, get_args

import jax
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels import dispatch
from jaxserve.kernels.kv_write import cpu, reference, xla
from jaxserve.kernels.kv_write.operands import RopeTables, Written

Implementation = Literal["reference", "xla", "cpu", "triton", "triton_interpreted"]

_IMPLEMENTATIONS = {
    "reference": reference.rotate_and_write,
    "xla": xla.rotate_and_write,
    "cpu": cpu.rotate_and_write,
    **dispatch.by_triton("kv_write", "rotate_and_write"),
}
_PREFERRED = {"cuda": ("triton",), "cpu": ("cpu",)}

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def rotate_and_write(
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    tables: RopeTables | None,
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
    *,
    k_scales: Float32[Array, "layers pages kv_heads page_size"] | None = None,
    v_scales: Float32[Array, "layers pages kv_heads page_size"] | None = None,
    implementation: Implementation | None = None,
) -> Written:
    """Rotate a step's queries and keys, and write its keys and values into the paged cache.

    The cache is updated in place when it is donated. The rotation is in float32.

    Args:
      qkv: `columns` is group + 2: each KV head's queries, its key, its value.
      tables: cosines and sines of the tokens' positions, float32 [tokens, rotated / 2] each, for
        the first `rotated` dimensions of a head; None for no rotation.
      k_pages, v_pages: [layers, pages, kv_heads, page_size, head_dim].
      layer: index of the cache's layer; may be traced.
      page, offset: int32 [tokens], each token's page and its offset in the page. A pair may occur
        once, except in page 0, the null page for padding, whose content is undefined.
      k_scales, v_scales: float32 [layers, pages, kv_heads, page_size], scales of 8-bit pages (see
        `quantize`), written with them; both or none.
      implementation: "triton" on NVIDIA GPUs, "cpu" on the CPU if a compiler is found, and "xla"
        elsewhere or if those refuse.

    Returns:
      Queries [tokens, kv_heads * group, head_dim] in qkv's dtype, and `k_pages`, `v_pages`,
      `k_scales` and `v_scales` with the tokens written.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    _check_shapes(qkv, tables, k_pages, v_pages, page, offset)
    for scales in (k_scales, v_scales):
        if (scales is None) != (k_scales is None) or (
            scales is not None and scales.shape != k_pages.shape[:4]
        ):
            raise ValueError(
                f"k_scales and v_scales do not fit; pass both or none, of shape {k_pages.shape[:4]}"
            )
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
            f"qkv{qkv.shape}, k_pages{k_pages.shape} and v_pages{v_pages.shape} do not fit; pass "
            "[tokens, kv_heads, group + 2, head_dim] and twice "
            "[layers, pages, kv_heads, page_size, head_dim]"
        )
    if {page.shape, offset.shape} != {qkv.shape[:1]}:
        raise ValueError(
            f"page{page.shape} and offset{offset.shape} do not fit; pass one per token, "
            f"[{qkv.shape[0]}]"
        )
    for table in tables or ():
        if table.shape[:1] != qkv.shape[:1] or 2 * table.shape[1] > qkv.shape[3]:
            raise ValueError(
                f"a table{table.shape} does not fit qkv{qkv.shape}; pass [tokens, rotated / 2] "
                "with rotated at most head_dim"
            )
