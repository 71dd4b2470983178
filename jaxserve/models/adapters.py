"""Weights with low-rank adapters; each token uses its own adapter."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels import add_low_rank, grouped_matmul
from jaxserve.models.linear import WeightAxes, representation_of


@final
class AdaptedWeight(nnx.Module):
    """A weight, and several low-rank changes of it (LoRA, arXiv:2106.09685).

        base    the weight without adapters: a parameter, or a `QuantisedWeight`
        a       [*stacked, adapters, *in, ranks]
        b       [*stacked, adapters, rank, *out]
        scale   float32 [*stacked, adapters]

    A token whose adapter is i is multiplied by `base + scale[i] * a[i] @ b[i]`, a token whose
    adapter is -1 by `base`. Tokens are grouped by adapter, so that each is multiplied with its own
    matrices only, for any number of adapters.

    If the weight is made of several modules of a checkpoint, `a` has the columns of all of them,
    and each output uses those of its own module: `spans` lists, for runs of consecutive outputs,
    the number of their module and their count. It is empty if there is one module.
    """

    def __init__(
        self,
        base: Any,
        a: nnx.Param,
        b: nnx.Param,
        scale: nnx.Param,
        spans: tuple[tuple[int, int], ...] = (),
    ):
        self.base = base
        self.a = a
        self.b = b
        self.scale = scale
        self.spans = spans

    @classmethod
    def empty(
        cls,
        dense: nnx.Variable,
        axes: WeightAxes,
        *,
        num_adapters: int,
        rank: int,  # of each module's change
        spans: tuple[tuple[int, int], ...] = (),
        dtype: jax.typing.DTypeLike | None = None,  # of the adapters; by default that of `dense`
        base: Any = None,  # represents the weight if `dense` has only its shape; by default `dense`
        place: jax.sharding.Sharding | None = None,
    ) -> AdaptedWeight:
        """Return a weight with adapters of zeros at `place`, by default the default device."""
        like, names = dense.get_value(), dense.get_metadata()["logical_axes"]
        stacked, summed, out = axes.split(like.shape)
        stacked_names, in_names, out_names = axes.split(names)
        dtype = like.dtype if dtype is None else dtype
        ranks = rank * (1 + max((module for module, _ in spans), default=0))

        def zeros(
            shape: tuple[int, ...], names: tuple[str | None, ...], dtype: Any, *, has_own: bool
        ) -> nnx.Param:
            return nnx.Param(
                jnp.zeros((*stacked, num_adapters, *shape), dtype, device=place),
                logical_axes=(*stacked_names, None, *names),
                is_adapter=True,
                **({"has_own_dtype": True} if has_own else {}),
            )

        has_own = dtype != like.dtype

        return cls(
            dense if base is None else base,
            zeros((*summed, ranks), (*in_names, None), dtype, has_own=has_own),
            zeros((rank, *out), (None, *out_names), dtype, has_own=has_own),
            zeros((), (), jnp.float32, has_own=True),
            spans,
        )

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        out = representation_of(self.base).product(
            x, adapter, transposed=transposed, out_dtype=out_dtype
        )
        if adapter is None:
            return out
        a, b, scale = self.a[...], self.b[...], self.scale[...]
        num_adapters, rank = b.shape[:2]
        x = x.reshape(x.shape[0], -1)
        changed = add_low_rank(
            out.reshape(x.shape[0], -1),
            x,
            a.reshape(num_adapters, x.shape[1], -1),
            b.reshape(num_adapters, rank, -1),
            scale,
            adapter,
            spans=self.spans,
        )
        return changed.reshape(out.shape)

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        out = representation_of(self.base).grouped_product(x, sizes, adapter)
        if adapter is None:
            return out
        a, b = self.a[...].astype(x.dtype), self._wide_b(num_before=2).astype(x.dtype)
        matrices, num_adapters, width, rank = a.shape
        together = num_adapters * rank
        inner = grouped_matmul(x, a.transpose(0, 2, 1, 3).reshape(matrices, width, -1), sizes)
        ends = jnp.cumsum(sizes)
        matrix = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")
        scale = self.scale[...][jnp.minimum(matrix, matrices - 1)]  # [tokens, adapters]
        inner = self._own(inner.reshape(-1, num_adapters, rank), adapter, scale)
        added = grouped_matmul(
            inner.astype(x.dtype).reshape(-1, together), b.reshape(matrices, together, -1), sizes
        )
        return out + added.reshape(out.shape)

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        out = representation_of(self.base).rows(index, adapter, dtype)
        if adapter is None:
            return out
        b = self._wide_b(num_before=1)
        inner = b[jnp.maximum(adapter, 0), :, index]  # [tokens, ranks]
        own = self._own(inner[:, None].astype(jnp.float32), adapter, self.scale[...])
        a = self.a[...].astype(dtype)
        return out + jnp.einsum("tar,air->ti", own.astype(dtype), a)

    def _wide_b(self, *, num_before: int) -> Float[Array, " ... ranks *out"]:
        """Return `b` with rows for all modules, zeros where an output is another module's."""
        b = self.b[...]
        if not self.spans:
            return b
        module_of = np.repeat(*np.array(self.spans).T)
        is_own = module_of == np.arange(module_of.max() + 1)[:, None, None]  # [modules, 1, out]
        before, out = b.shape[:num_before], b.shape[num_before + 1 :]
        flat = b.reshape(*before, 1, b.shape[num_before], -1)
        return jnp.where(is_own, flat, 0).reshape(*before, -1, *out)

    def _own(
        self,
        inner: Float[Array, " tokens #adapters rank"],
        adapter: Int32[Array, " tokens"],
        scale: Float32[Array, " adapters"] | Float32[Array, "tokens adapters"],
    ) -> Float32[Array, "tokens adapters rank"]:
        """Return `inner` scaled, with zeros for adapters of other tokens."""
        is_own = adapter[:, None] == jnp.arange(scale.shape[-1])
        scaled = inner.astype(jnp.float32) * scale[..., None]
        return jnp.where(is_own[..., None], scaled, 0.0)


def without_adapters(params: Any) -> Any:
    """Return an `nnx.State` without parameters of adapters; anything else unchanged."""
    if not isinstance(params, nnx.State):
        return params
    flat = nnx.to_flat_state(params)
    own = [(path, v) for path, v in flat if not v.get_metadata().get("is_adapter", False)]
    return params if len(own) == len(flat) else nnx.from_flat_state(own)
