"""Named shapes for the tests and the benchmarks of writes into pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.kv_write.api import rotate_and_write
from jaxserve.kernels.kv_write.operands import LARGEST


@final
@dataclass(frozen=True, kw_only=True)
class WriteShape:
    """A step's write into a cache [layers, pages, kv_heads, page_size, head_dim].

    `rotated` is 0 for a model without rotary embeddings; 8-bit pages have scales.
    """

    name: str
    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    rotated: int
    page_size: int = 32
    dtype: str = "bfloat16"
    page_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return self.name

    @property
    def is_quantized(self) -> bool:
        return self.page_dtype in LARGEST

    @property
    def moved_bytes(self) -> int:
        """Minimum of bytes read and written: every head once each, and the tables."""
        heads = self.tokens * self.kv_heads
        read = heads * (self.group + 2) * self.head_dim * jnp.dtype(self.dtype).itemsize
        queries = heads * self.group * self.head_dim * jnp.dtype(self.dtype).itemsize
        written = 2 * heads * self.head_dim * jnp.dtype(self.page_dtype).itemsize
        scales = 2 * heads * 4 * self.is_quantized
        return read + queries + written + scales + self.tokens * self.rotated * 4


_TINY: dict[str, Any] = dict(page_size=4, dtype="float32", page_dtype="float32")

# Small enough for the reference: whole and partial rotation, and sizes that fill no tile.
TEST_SHAPES = (
    WriteShape(name="whole", tokens=13, kv_heads=2, group=3, head_dim=16, rotated=16, **_TINY),
    WriteShape(name="quarter", tokens=5, kv_heads=3, group=1, head_dim=40, rotated=10, **_TINY),
    WriteShape(name="none", tokens=7, kv_heads=1, group=5, head_dim=24, rotated=0, **_TINY),
    WriteShape(name="one_token", tokens=1, kv_heads=2, group=2, head_dim=8, rotated=8, **_TINY),
    WriteShape(
        name="mixed_dtypes",
        tokens=6,
        kv_heads=2,
        group=2,
        head_dim=16,
        rotated=16,
        page_size=8,
        dtype="bfloat16",
        page_dtype="float32",
    ),
    *(
        WriteShape(
            name=dtype,
            tokens=9,
            kv_heads=2,
            group=2,
            head_dim=24,
            rotated=16,
            page_size=8,
            dtype="bfloat16",
            page_dtype=dtype,
        )
        for dtype in LARGEST
    ),
)

_LLAMA3_8B = WriteShape(
    name="llama3_8b_decode_64", tokens=64, kv_heads=8, group=4, head_dim=128, rotated=128
)

# Compiled before a release and timed on GPUs: Llama 3 8B, and variations of it.
GPU_SHAPES = (
    _LLAMA3_8B,
    replace(_LLAMA3_8B, name="llama3_8b_decode_256", tokens=256),
    replace(_LLAMA3_8B, name="llama3_8b_prefill_8192", tokens=8192),
    replace(_LLAMA3_8B, name="llama3_8b_int8_256", tokens=256, page_dtype="int8"),
    replace(_LLAMA3_8B, name="llama3_8b_float8_8192", tokens=8192, page_dtype="float8_e4m3fn"),
    WriteShape(
        name="llama2_13b_decode_64", tokens=64, kv_heads=40, group=1, head_dim=128, rotated=128
    ),
    WriteShape(name="gemma_256", tokens=256, kv_heads=4, group=2, head_dim=256, rotated=256),
    WriteShape(name="neox_256", tokens=256, kv_heads=8, group=1, head_dim=96, rotated=24),
    WriteShape(name="opt_256", tokens=256, kv_heads=12, group=1, head_dim=64, rotated=0),
    WriteShape(
        name="float16_256",
        tokens=256,
        kv_heads=1,
        group=8,
        head_dim=80,
        rotated=80,
        dtype="float16",
        page_dtype="float16",
    ),
    WriteShape(
        name="float32_256",
        tokens=256,
        kv_heads=2,
        group=5,
        head_dim=64,
        rotated=64,
        dtype="float32",
        page_dtype="float32",
    ),
)


@final
@dataclass(frozen=True)
class Configuration:
    shape: WriteShape
    kernels = frozenset({"rotate_and_write"})

    def __str__(self) -> str:
        return f"rotate_and_write-{self.shape}"

    @property
    def donated(self) -> tuple[str, ...]:
        scales = ("k_scales", "v_scales") if self.shape.is_quantized else ()
        return ("k_pages", "v_pages", *scales)

    def call(self) -> tuple[Any, dict[str, Any]]:
        shape = self.shape
        cache = (2, 1000, shape.kv_heads, shape.page_size)

        def array(dtype: str, *size: int) -> Any:
            return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

        table, place = (
            array("float32", shape.tokens, shape.rotated // 2),
            array("int32", shape.tokens),
        )
        arguments: dict[str, Any] = dict(
            qkv=array(shape.dtype, shape.tokens, shape.kv_heads, shape.group + 2, shape.head_dim),
            tables=(table, table) if shape.rotated else None,
            k_pages=array(shape.page_dtype, *cache, shape.head_dim),
            v_pages=array(shape.page_dtype, *cache, shape.head_dim),
            layer=array("int32"),
            page=place,
            offset=place,
        )
        if shape.is_quantized:
            arguments["k_scales"] = arguments["v_scales"] = array("float32", *cache)
        return rotate_and_write, arguments


CONFIGURATIONS = tuple(Configuration(shape) for shape in GPU_SHAPES)
# Timed on a CPU.
SMALL_CONFIGURATIONS = (
    Configuration(
        WriteShape(
            name="smollm2_decode_32",
            tokens=32,
            kv_heads=3,
            group=3,
            head_dim=64,
            rotated=64,
            dtype="float32",
            page_dtype="float32",
        )
    ),
)


def make_inputs(
    shape: WriteShape, seed: int, *, layers: int = 2, padding: int = 0
) -> dict[str, Any]:
    """Return random arguments of `rotate_and_write`, except `layer`.

    Tokens have distinct places, except the last `padding` tokens, which go to the null page.
    """
    random = np.random.default_rng(seed)
    num_pages = 2 + -(-shape.tokens // shape.page_size)
    places = shape.page_size + random.permutation((num_pages - 1) * shape.page_size)[: shape.tokens]
    places[shape.tokens - padding :] = random.integers(0, shape.page_size, padding)

    def normal(dtype: str, *size: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(size), jnp.float32).astype(dtype)

    angles = random.uniform(0, 2 * np.pi, (shape.tokens, shape.rotated // 2))
    cache = (layers, num_pages, shape.kv_heads, shape.page_size)
    k_scales, v_scales = (
        normal("float32", *cache) if shape.is_quantized else None for _ in range(2)
    )
    return dict(
        qkv=normal(shape.dtype, shape.tokens, shape.kv_heads, shape.group + 2, shape.head_dim),
        tables=tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        if shape.rotated
        else None,
        k_pages=normal(shape.page_dtype, *cache, shape.head_dim),
        v_pages=normal(shape.page_dtype, *cache, shape.head_dim),
        page=jnp.asarray(places // shape.page_size, jnp.int32),
        offset=jnp.asarray(places % shape.page_size, jnp.int32),
        k_scales=k_scales,
        v_scales=v_scales,
    )
