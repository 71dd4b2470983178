"""Products with a weight that is laid out for the CPU once, when it is loaded.

A weight [in, out] becomes panels [panels, in, PANEL]: PANEL columns in one run of memory, in the
order in which the kernel (panels.cc) reads them. The last panel is filled with zeros. Panels in
bfloat16 have pairs of adjacent inputs, [panels, in / 2, 2 PANEL]: those of the first column, and so
on. Inputs and sums are float32; where the processor has instructions for bfloat16 (AVX512-BF16) and
the panels are in it, the kernel rounds the inputs, too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.matmul import xla

PANEL = 48  # columns; panels.cc has the same number
SOURCE = Path(__file__).with_name("panels.cc")
SYMBOL = "PanelMatmul"
COLUMNS = Path(__file__).with_name("columns.cc")
# The flags of the library for panels of each dtype.
STORED = {"float32": ("-DPANELS=float",), "bfloat16": ("-DPANELS=Pair",)}

Implementation = Literal["xla", "cpu"]


def to_panels(
    weight: Float32[Array, "in out"], dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "panels depth width"]:
    """Return a weight in panels, rounded to a dtype; its inputs are even for bfloat16."""
    depth, columns = weight.shape
    run = _run(dtype)
    padded = jnp.pad(weight.astype(dtype), ((0, 0), (0, -columns % PANEL)))
    ordered = padded.reshape(depth // run, run, -1, PANEL).transpose(2, 0, 3, 1)
    return ordered.reshape(-1, depth // run, PANEL * run)


def from_panels(panels: Float[Array, "panels depth width"], columns: int) -> Float[Array, "in out"]:
    """Return the weight of `columns` columns that is in panels, in their dtype."""
    ordered = _split(panels).transpose(1, 3, 0, 2)
    return ordered.reshape(ordered.shape[0] * ordered.shape[1], -1)[:, :columns]


def columns_of(
    panels: Float[Array, "panels depth width"],
    index: Int[Array, " tokens"],
    *,
    implementation: Implementation | None = None,
) -> Float32[Array, "tokens in"]:
    """Return columns of the weight, as rows.

    Args:
      implementation: "cpu" on the CPU for panels in bfloat16, of which XLA first converts all to
        float32, and "xla" otherwise.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    return dispatch.call(
        "columns_of",
        {"xla": _columns_by_xla, "cpu": _columns_by_kernel},
        {"cpu": ("cpu",) if panels.dtype == jnp.bfloat16 else ()},
        implementation,
        panels=panels,
        index=index,
    )


def _columns_by_xla(
    panels: Float[Array, "panels depth width"], index: Int[Array, " tokens"]
) -> Float32[Array, "tokens in"]:
    found = _split(panels)[index // PANEL, :, index % PANEL]
    return found.reshape(index.shape[0], -1).astype(jnp.float32)


def _columns_by_kernel(
    panels: Float[Array, "panels depth width"], index: Int[Array, " tokens"]
) -> Float32[Array, "tokens in"]:
    dispatch.require_cpu()
    if str(panels.dtype) not in STORED:
        raise NotImplementedError(f"it reads panels in {' or '.join(STORED)}, not {panels.dtype}")
    shape = index.shape[0], panels.shape[1] * _run(panels.dtype)
    target = build.cpu_target(COLUMNS, "PanelColumns")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(panels, index.astype(jnp.int32))


def _split(panels: Float[Array, "panels depth width"]) -> Float[Array, "panels depth panel run"]:
    return panels.reshape(*panels.shape[:2], PANEL, _run(panels.dtype))


def _run(dtype: jax.typing.DTypeLike) -> int:
    """Return how many inputs of a column are side by side."""
    return 4 // jnp.dtype(dtype).itemsize


def panel_matmul(
    x: Float32[Array, "tokens in"],
    panels: Float[Array, "panels depth width"],
    *,
    columns: int,
    implementation: Implementation | None = None,
) -> Float32[Array, "tokens out"]:
    """Multiply `x` with a weight in panels.

    Args:
      x: is rounded to bfloat16 if the panels are in it and the processor multiplies such numbers.
      columns: number of the weight's columns.
      implementation: "cpu" on the CPU if a compiler is found, and "xla", which copies the weight
        for each product, elsewhere or if that refuses.

    Returns:
      [tokens, columns]. With "cpu", the bits of a row do not depend on the other rows.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    run = _run(panels.dtype)
    wanted = (-(-columns // PANEL), x.shape[-1] // run, PANEL * run)
    if x.ndim != 2 or panels.shape != wanted:
        raise ValueError(
            f"x{x.shape} and panels{panels.shape} do not fit {columns} columns; pass [tokens, in] "
            f"and panels{wanted}"
        )
    return dispatch.call(
        "panel_matmul",
        {"xla": _by_xla, "cpu": _by_kernel},
        {"cpu": ("cpu",)},
        implementation,
        x=x,
        panels=panels,
        columns=columns,
    )


def call(
    target: str,
    x: Float32[Array, "tokens in"],
    panels: Float[Array, "panels depth width"],
    *,
    columns: int,
) -> Float32[Array, "tokens out"]:
    return _product(target, columns, x, panels, dispatch.computed_rows(x.shape[0]))


def _by_kernel(
    x: Float32[Array, "tokens in"], panels: Float[Array, "panels depth width"], *, columns: int
) -> Float32[Array, "tokens out"]:
    dispatch.require_cpu()
    flags = STORED.get(str(panels.dtype))
    if str(x.dtype) != "float32" or flags is None:
        raise NotImplementedError(
            f"it serves float32 with panels in {' or '.join(STORED)}, not {x.dtype} with "
            f"{panels.dtype}"
        )
    if 0 in (*x.shape, *panels.shape):
        raise NotImplementedError(f"x{x.shape} or panels{panels.shape} is empty")
    return call(build.cpu_target(SOURCE, SYMBOL, flags), x, panels, columns=columns)


def _by_xla(
    x: Float32[Array, "tokens in"], panels: Float[Array, "panels depth width"], *, columns: int
) -> Float32[Array, "tokens out"]:
    weight = from_panels(panels, columns).astype(x.dtype)
    return xla.matmul(x, weight, transposed=False, out_dtype=x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(
    target: str,
    columns: int,
    x: Float32[Array, "tokens in"],
    panels: Float[Array, "panels depth width"],
    is_computed: Bool[Array, " tokens"] | None,
) -> Float32[Array, "tokens out"]:
    shape = jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)
    return jax.ffi.ffi_call(target, shape)(x, panels, dispatch.as_operand(is_computed))


@_product.defjvp
def _derivative(
    target: str,
    columns: int,
    values: tuple[jax.Array, jax.Array, Any],
    tangents: tuple[jax.Array, jax.Array, Any],  # which rows are computed has none
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's product, which XLA can transpose."""
    (x, panels, _), (dx, dpanels, _) = values, tangents
    times = partial(_by_xla, columns=columns)
    return _product(target, columns, *values), times(dx, panels) + times(x, dpanels)
