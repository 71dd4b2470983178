"""Low-rank changes by grouped products, for every platform."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels.grouped_matmul import grouped_matmul


def add_low_rank(
    out: Float[Array, "tokens out"],
    x: Float[Array, "tokens in"],
    a: Float[Array, " adapters in ranks"],
    b: Float[Array, "adapters rank out"],
    scale: Float32[Array, " adapters"],
    adapter: Int32[Array, " tokens"],
    *,
    spans: tuple[tuple[int, int], ...],
) -> Float[Array, "tokens out"]:
    """Implement `api.add_low_rank` on tokens sorted by adapter; tokens without one come last."""
    order = jnp.argsort(jnp.where(adapter < 0, len(scale), adapter), stable=True)
    sizes = (adapter[:, None] == jnp.arange(len(scale))).sum(0, dtype=jnp.int32)
    inner = grouped_matmul(x[order], a.astype(x.dtype), sizes)
    own_scale = scale[jnp.maximum(adapter[order], 0), None]
    inner = (inner.astype(jnp.float32) * own_scale).astype(x.dtype)
    b, rank = b.astype(x.dtype), b.shape[1]
    change_of = np.repeat(*np.array(spans).T)
    columns = [np.flatnonzero(change_of == change) for change in range(change_of.max() + 1)]
    added = jnp.concatenate(
        [
            grouped_matmul(inner[:, change * rank : (change + 1) * rank], b[..., own], sizes)
            for change, own in enumerate(columns)
        ],
        axis=-1,
    )[:, np.argsort(np.concatenate(columns))]
    return out + added[jnp.argsort(order)].astype(out.dtype)
