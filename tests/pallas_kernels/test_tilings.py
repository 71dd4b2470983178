"""The tiling of a model depends on its heads, the device, and the requested kernel."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.kernels import paged_attention, versions
from jaxserve.kernels.cross import targeting
from jaxserve.kernels.gpu import GPUS
from jaxserve.kernels.paged_attention import planned_tiling, tiling_for
from jaxserve.kernels.paged_attention.planner import Launches
from jaxserve.kernels.paged_attention.shapes import TEST_SHAPES, make_inputs

HEADS = dict(kv_heads=2, group=4, head_dim=128)
DTYPES = dict(dtype="bfloat16", page_dtype="bfloat16")


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 33, 64])
def test_no_query_is_shared_by_warpgroups(group):
    """Each of the two warpgroups has whole queries, as many as fit in its 64 rows."""
    heads = dict(kv_heads=2, group=group, head_dim=64)
    tiling = tiling_for(
        device=GPUS["h100"].kind, num_cores=GPUS["h100"].num_cores, kind="mosaic", **heads
    )
    assert tiling.warpgroups is not None
    assert tiling.tile_queries == 2 * (64 // group)
    assert tiling.tile_programs == GPUS["h100"].num_cores


def test_what_takes_registers_is_launched_otherwise():
    """Float32 has fewer keys per iteration, ALiBi or two masks more warps; the rest is equal."""
    tiling = tiling_for(device=GPUS["h100"].kind, num_cores=GPUS["h100"].num_cores, **HEADS)

    def launches(dtype: str, *masks: str) -> Launches:
        names = ("has_alibi", "has_window", "has_cap")
        return tiling.launches_for(dtype, **{name: name in masks for name in names})

    plain = launches("bfloat16")
    for mask in ("has_window", "has_cap"):
        assert launches("float16", mask) == plain == tiling.launches
    masked = launches("float16", "has_alibi")
    assert masked == launches("bfloat16", "has_window", "has_cap")
    assert masked.split.num_warps > plain.split.num_warps
    assert masked.tile.num_warps > plain.tile.num_warps
    assert (masked.block_keys, masked.merge) == (plain.block_keys, plain.merge)
    wide = launches("float32", "has_alibi")
    assert wide == launches("float32") and wide.block_keys < plain.block_keys


@pytest.mark.parametrize(
    ("asked", "heads", "is_mosaic"),
    [
        ("triton_interpreted", {}, False),
        ("mosaic_interpreted", {}, True),
        ("mosaic_interpreted,triton_interpreted", {}, True),
        ("triton_interpreted,mosaic_interpreted", {}, False),
        ("mosaic_interpreted", dict(head_dim=96), False),
        ("mosaic_interpreted", dict(group=128), False),
        ("mosaic_interpreted", dict(dtype="float32", page_dtype="float32"), False),
        ("mosaic_interpreted", dict(page_dtype="int8"), False),
    ],
)
def test_the_tiles_are_those_of_the_kernel_that_comes_first(asked, heads, is_mosaic):
    """Mosaic's tiles are used if it is requested first and may serve these heads and pages."""
    tiling = planned_tiling(jax.devices()[0], asked, **{**DTYPES, **HEADS, **heads})
    assert tiling is not None
    assert (tiling.warpgroups is not None) == is_mosaic


@pytest.mark.parametrize(("name", "is_mosaic"), [("h200", True), ("a100", False), ("b200", False)])
def test_tiles_of_mosaic_are_for_hopper(name, is_mosaic):
    """On other GPUs Triton is next, and has tiles of its own."""
    gpu = GPUS[name]
    device = SimpleNamespace(
        platform="gpu",
        device_kind=gpu.kind,
        compute_capability="{}.{}".format(*gpu.capability),
        core_count=gpu.num_cores,
    )
    with targeting(gpu):
        tiling = planned_tiling(device, "mosaic,triton", **DTYPES, **HEADS)
    assert tiling is not None
    assert (tiling.warpgroups is not None) == is_mosaic
    assert tiling.tile_programs % gpu.num_cores == 0


@pytest.mark.parametrize(
    ("asked", "is_refused"), [(None, False), ("triton,xla", False), ("triton", True)]
)
def test_xla_serves_heads_without_a_tiling(asked, is_refused):
    """Gemma 4 has heads of 512 numbers; the kernel that is asked for alone says what it serves."""
    gpu = GPUS["h200"]
    device = SimpleNamespace(platform="gpu", device_kind=gpu.kind, core_count=gpu.num_cores)
    with targeting(gpu):
        if is_refused:
            with pytest.raises(NotImplementedError, match="no tiling for head_dim 512"):
                planned_tiling(device, asked, **DTYPES, **HEADS | {"head_dim": 512})
        else:
            assert planned_tiling(device, asked, **DTYPES, **HEADS | {"head_dim": 512}) is None


@pytest.mark.parametrize("asked", [None, "xla", "triton", "mosaic,triton"])
def test_there_is_none_where_no_kernel_needs_a_plan(asked):
    """On a CPU only interpreted kernels use plans."""
    assert planned_tiling(jax.devices()[0], asked, **DTYPES, **HEADS) is None


@pytest.mark.skipif(versions.has_mosaic(), reason="this JAX is new enough for Mosaic")
def test_mosaic_refuses_an_old_jax():
    """The refusal has the required and the present version."""
    q, k_pages, v_pages, rows = make_inputs(TEST_SHAPES[0], seed=1)
    with pytest.raises(NotImplementedError, match="JAX 0.11 or newer, not 0.10"):
        paged_attention(q.astype(jnp.bfloat16), k_pages, v_pages, 0, rows, implementation="mosaic")
