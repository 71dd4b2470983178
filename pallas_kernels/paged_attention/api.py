"""The public signature of paged attention, and which implementation serves it."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import cpu, mosaic, reference, triton, xla
from pallas_kernels.paged_attention.planner import Plan
from pallas_kernels.paged_attention.rows import Rows

_IMPLEMENTATIONS = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "cpu": cpu.paged_attention,
    "triton": triton.paged_attention,
    "triton_interpreted": partial(triton.paged_attention, interpret=True),
    "mosaic": mosaic.paged_attention,
    "mosaic_interpreted": partial(mosaic.paged_attention, interpret=True),
}
_PREFERRED = {"cpu": ("cpu",), "cuda": ("triton",)}

IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)

jax.tree_util.register_dataclass(
    Plan,
    data_fields=["tiles", "splits", "merges", "counts"],
    meta_fields=["tiling", "num_slots"],
)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    max_query_length: int | None = None,
    plan: Plan | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal grouped-query attention of a flat ragged batch over paged keys and values.

    A query at position p sees the keys at positions <= p of its sequence, whatever row they came
    from; with a sliding window w, only those at positions > p - w. Softmax in float32.

    Args:
      q: [tokens, q_heads, head_dim]; query head h reads KV head h // (q_heads // kv_heads).
      k_pages, v_pages: [layers, pages, kv_heads, page_size, head_dim].
      layer: which layer of the cache; may be traced.
      rows: see `Rows`. Tokens that belong to no row have undefined (finite) output.
      scale: of the logits; 1 / sqrt(head_dim) by default.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      alibi_slopes: float32 [q_heads]; adds slope * (key position - query position).
      k_scales, v_scales: float32 [layers, pages, kv_heads, page_size], which quantized pages (int8,
        float8) are to be multiplied by; both or none.
      max_query_length: static bound on `rows.query_length`. 1 promises a decode batch: token i
        is the only query of row i.
      plan: of these rows, by `planner.plan`, for kernels that share them out beforehand. Rows
        may have shrunk since.
      implementation: overrides the platform's choice, made when the call is traced and logged
        once: "cpu" on the CPU, "triton" on NVIDIA GPUs, "xla" elsewhere and where those refuse.
        One of `IMPLEMENTATIONS`, or several with commas between them, of which the first that can
        serves: "mosaic,triton". The "_interpreted" ones run anywhere, for tests.

    Returns:
      [tokens, q_heads, head_dim] in q's dtype.

    Raises:
      NotImplementedError: the implementation asked for cannot serve this case; says why.
      ValueError: the shapes contradict each other, or the implementation is unknown.
    """
    _check_shapes(q, k_pages, v_pages, rows, alibi_slopes, max_query_length)
    _check_scales(k_pages, k_scales, v_scales)
    return dispatch.call(
        "paged_attention",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        layer=layer,
        rows=rows,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        k_scales=k_scales,
        v_scales=v_scales,
        max_query_length=max_query_length,
        plan=plan,
    )


def _check_shapes(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    rows: Rows,
    alibi_slopes: jax.Array | None,
    max_query_length: int | None,
) -> None:
    if q.ndim != 3 or k_pages.ndim != 5 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"q{q.shape}, k_pages{k_pages.shape}, v_pages{v_pages.shape}: expected "
            "[tokens, q_heads, head_dim] and twice [layers, pages, kv_heads, page_size, head_dim]"
        )
    if q.shape[2] != k_pages.shape[4] or q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            f"q{q.shape} and k_pages{k_pages.shape}: head_dim must agree, and q_heads be a "
            "multiple of kv_heads"
        )
    if 0 in (*q.shape[1:], *k_pages.shape[2:]):
        raise ValueError(f"q{q.shape} and k_pages{k_pages.shape}: no heads, or empty pages")
    sizes = (rows.query_start, rows.query_length, rows.first_position, rows.context_length)
    shapes = [x.shape for x in sizes]
    if rows.page_table.ndim != 2 or set(shapes) != {rows.page_table.shape[:1]}:
        raise ValueError(
            f"rows of {shapes} with page_table{rows.page_table.shape}: expected four times [rows] "
            "and [rows, pages]"
        )
    if alibi_slopes is not None and alibi_slopes.shape != q.shape[1:2]:
        raise ValueError(f"alibi_slopes{alibi_slopes.shape}: expected one of {q.shape[1]} heads")
    if max_query_length == 1 and q.shape[0] != rows.query_length.shape[0]:
        raise ValueError(
            f"max_query_length=1 promises one token a row, but there are {q.shape[0]} tokens and "
            f"{rows.query_length.shape[0]} rows"
        )


def _check_scales(pages: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None) -> None:
    if (k_scales is None) != (v_scales is None):
        raise ValueError("k_scales and v_scales belong together; give both or none")
    for scales in (k_scales, v_scales):
        if scales is not None and scales.shape != pages.shape[:4]:
            raise ValueError(
                f"scales{scales.shape}: expected {pages.shape[:4]}, one a token and head"
            )
