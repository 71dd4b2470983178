"""The public signature of gated cells, and the choice of their implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Array, Float

from jaxserve.kernels import dispatch
from jaxserve.kernels.gated_cell import cpu, reference, xla
from jaxserve.kernels.gated_cell.operands import KINDS, Kind, Product, RowsAt

Implementation = Literal["reference", "xla", "cpu", "triton", "triton_interpreted"]

_PREFERRED = {"cuda": ("triton",), "cpu": ("cpu",)}


def gated_cell(
    kind: Kind,
    products: Sequence[Product],
    carried: Sequence[RowsAt],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "batch hidden"], ...]:
    """Compute one step of a recurrent or tree cell, whose inputs are rows of larger arrays.

    The gates of each product are slices of equal width of `concatenate(rows) @ weight + bias`, plus
    `added` if it is given.

    Args:
      kind: what the gates do with the carried states; see `KINDS` for products and gates.
      products: products of embeddings and states with weights.
      carried: states [batch, hidden] that the gates scale.
      implementation: "triton" on NVIDIA GPUs, "cpu" on the CPU if a compiler is found, and "xla"
        elsewhere or if these refuse.

    Returns:
      The new states, each [batch, hidden]: h and then c, or h alone for "gru".

    Raises:
      NotImplementedError, ValueError: see `dispatch`; ValueError also for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; pass one of {tuple(KINDS)}")
    _check(kind, products, carried)
    implementations = {
        "reference": reference.gated_cell,
        "xla": xla.gated_cell,
        "cpu": cpu.gated_cell,
        **dispatch.by_triton("gated_cell", "gated_cell"),
    }
    return dispatch.call(
        "gated_cell",
        implementations,
        _PREFERRED,
        implementation,
        kind=kind,
        products=tuple(products),
        carried=tuple(carried),
    )


def _check(kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]) -> None:
    wanted = KINDS[kind]
    shapes = [
        *(
            f"product {[rows.shape for rows in one.rows]} @ {one.weight.shape} + {one.bias.shape}"
            for one in products
        ),
        *(f"carried {rows.shape}" for rows in carried),
    ]
    all_rows = [rows for one in products for rows in one.rows] + list(carried)
    fits = (len(products), len(carried)) == (len(wanted.num_gates), wanted.num_carried) and len(
        {rows.shape[0] for rows in all_rows}
    ) == 1
    hidden = {rows.shape[1] for rows in carried}
    for one, num in zip(products, wanted.num_gates, strict=False):
        width = sum(rows.shape[1] for rows in one.rows)
        hidden.add(one.bias.shape[0] // num)
        fits = fits and one.weight.shape == (width, one.bias.shape[0])
        fits = fits and one.bias.shape[0] % num == 0
        if one.added is not None:
            fits = fits and one.added.shape == (all_rows[0].shape[0], one.bias.shape[0])
    if not fits or len(hidden) != 1:
        raise ValueError(
            f"a cell of kind {kind!r} was given {'; '.join(shapes)}; pass products with "
            f"{wanted.num_gates} gates and {wanted.num_carried} carried states of one batch and "
            "one hidden size"
        )
