"""Kernels are timed at existing shapes, and peers are called only for what they support."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common.roofline import Machine
from benchmarks.kernels import peers_jax
from benchmarks.kernels.calls import measure_groups, measure_product
from benchmarks.kernels.timing import SHAPES, Attention, chosen
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import paged_attention
from jaxserve.kernels.paged_attention.shapes import TEST_SHAPES, AttentionShape

pytestmark = pytest.mark.release

FLOAT32 = jnp.dtype("float32")


def test_shapes_go_by_kind_and_by_name():
    """Shapes come in the requested order, each once, without the excluded ones."""
    first = SHAPES["decode"][3].name
    shapes, moves = chosen(f"{first},decode,small_moves", "llama2_13b_decode_32x4096")
    assert [shape.name for shape in shapes[:2]] == [first, SHAPES["decode"][0].name]
    assert len(shapes) == len(SHAPES["decode"]) - 1
    assert moves
    with pytest.raises(InvalidConfigError, match=r"unknown shapes \['nothing'\]"):
        chosen("decode,nothing")
    with pytest.raises(InvalidConfigError, match=r"unknown shapes \['nothing'\]"):
        chosen("decode", "nothing")


def test_products_are_timed_and_compared():
    """Each format has a time, a bound, an error that rounding explains, and a dense time."""
    _, (*configurations,) = chosen("small_products")
    for each in configurations:
        found = measure_product(each, Machine(flops_per_s=1e9, bytes_per_s=1e9))
        assert found["seconds"] > 0 and found["xla_s"] > 0 and found["dense_s"] > 0
        assert found["bound_s"] >= 1e-9 * 576 * 576 / 2
        assert 1e-4 < found["error"] < 2e-2


def test_groups_are_timed_beside_xla_and_a_loop():
    """Each has a time; the bound counts the matrices that have tokens."""
    _, (shape,) = chosen("small_groups")
    found = measure_groups(shape, Machine(flops_per_s=1e9, bytes_per_s=1e9))
    assert min(found["seconds"], found["xla_s"], found["loop_s"]) > 0
    flops = 2 * shape.tokens * shape.inputs * shape.columns
    assert found["bound_s"] >= flops / 1e9 and found["error"] < 1e-6


def test_errors_are_of_rows_of_every_kind():
    """Errors cover the first rows and the last; they are 0 for XLA in float32, else positive."""
    (shape,) = (shape for shape in TEST_SHAPES if shape.name == "mixed")
    shape = replace(shape, rows=tuple(row for row in shape.rows if row[0]))
    assert Attention.of(shape, FLOAT32, FLOAT32, 1, "xla").error() == 0.0
    bfloat16 = jnp.dtype("bfloat16")
    assert 1e-4 < Attention.of(shape, bfloat16, bfloat16, 1, "xla").error() < 1e-2


def test_kernels_with_plans_are_timed_and_compared():
    """The plan uses the requested tiles."""
    shape = AttentionShape(
        name="two", num_heads=2, num_kv_heads=1, head_dim=16, page_size=8, rows=((1, 1), (1, 37))
    )
    planned = Attention.of(shape, FLOAT32, FLOAT32, 2, "triton_interpreted")
    assert planned.tiling is not None and planned.error() < 1e-5
    assert Attention.of(shape, FLOAT32, FLOAT32, 2, "xla").seconds() > 0


@pytest.mark.parametrize("width", [1, 2, 3, 4, 15, 16, 17, 128, 130, 500, 512, 4096])
def test_page_tables_are_made_splittable(width: int):
    """JAX's kernel needs parts of one size, in whole compute blocks; the pages stay the same."""
    table = jnp.arange(3 * width).reshape(3, width)
    padded, splits = peers_jax.splittable(table)
    part, rest = divmod(padded.shape[1], splits)
    assert rest == 0
    assert part % min(part, 8) == 0
    assert padded.shape[1] < 2 * width + 8 * splits
    assert jnp.array_equal(padded[:, :width], table)


def test_jax_paged_attention_is_asked_rightly(monkeypatch):
    """JAX's kernel, interpreted over our pages and a padded table, agrees with ours."""
    from jax.experimental.pallas.ops.gpu import paged_attention as peer

    shape = AttentionShape(
        name="odd",
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page_size=8,
        rows=((1, 40), (1, 1), (1, 23)),
    )
    given = Attention.of(shape, FLOAT32, FLOAT32, 1)
    asked = []
    interpreted = functools.partial(peer.paged_attention, interpret=True)
    monkeypatch.setattr(peer, "paged_attention", interpreted)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def take(attend, q, pages, layers) -> float:
        asked.append(attend(q, 0, pages))
        assert layers == 1
        return 1.0

    found = peers_jax.measure(given, take)
    monkeypatch.undo()
    assert found["jax_paged"] == {"seconds": 1.0}
    assert "reason" in found["cudnn_dense"]  # cuDNN is not installed
    where = dict(layer=0, rows=given.rows, implementation="reference")
    wanted = paged_attention(given.q, **given.pages, **where)
    np.testing.assert_allclose(asked[0], wanted, rtol=2e-4, atol=2e-4)


def test_peers_without_a_gpu_say_so():
    """No peer is timed, and each has a reason."""
    (shape,) = (shape for shape in TEST_SHAPES if shape.name == "one_token")
    found = peers_jax.measure(Attention.of(shape, FLOAT32, FLOAT32, 1), lambda *_: 1.0)
    assert found == {
        name: {"reason": "NotImplementedError: there is no GPU"} for name in peers_jax.PEERS
    }
