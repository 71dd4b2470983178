"""The calls of paged attention that are lowered and compiled for GPUs before a release."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, final

import jax
import jax.numpy as jnp

from jaxserve.kernels.gpu import GPUS, Gpu
from jaxserve.kernels.paged_attention.api import paged_attention
from jaxserve.kernels.paged_attention.operands import Rows
from jaxserve.kernels.paged_attention.planner import Capacity, no_work
from jaxserve.kernels.paged_attention.tilings import tiling_for

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
# (KV heads, query heads per KV head): grouped, multi-query, plain, and a group that fills no tile.
_HEADS = ((8, 4), (1, 8), (4, 1), (2, 5))
# (dtype of queries, dtype of pages).
_DTYPES = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"has_sinks": True, "sliding_window": 1000},
    {"soft_cap": 30.0, "scale": 0.1},
    {"has_alibi": True, "sliding_window": 77, "soft_cap": 50.0},
)


@final
@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A kind of call; `options` are arguments of `paged_attention`, `has_alibi` and `has_sinks`.

    With `chunk_invariant`, the split kernel takes all rows.
    """

    head_dim: int
    page_size: int
    kv_heads: int
    group: int
    dtype: str
    page_dtype: str
    options: tuple[tuple[str, Any], ...]
    is_decode: bool
    kind: Literal["triton", "mosaic"] = "triton"
    chunk_invariant: bool = False
    gpu: Gpu = GPUS["h100"]
    donated = ()

    def __str__(self) -> str:
        heads = f"{self.kv_heads}x{self.group}x{self.head_dim}"
        names = "-".join(name for name, _ in self.options) or "plain"
        rows = "decode" if self.is_decode else "mixed"
        name = f"{heads}-page{self.page_size}-{self.dtype}-{self.page_dtype}-{names}-{rows}"
        name = f"{name}-invariant" if self.chunk_invariant else name
        return name if self.kind == "triton" else f"{self.kind}-{name}"

    @property
    def kernels(self) -> frozenset[str]:
        has_tiles = not (self.is_decode or self.chunk_invariant)
        kinds = ("tile", "split", "merge") if has_tiles else ("split", "merge")
        return frozenset(f"paged_attention_{kind}" for kind in kinds)

    def call(
        self, *, num_rows: int = 8, num_tokens: int = 64, num_pages: int = 40, width: int = 9
    ) -> tuple[Any, dict[str, Any]]:
        """Return a function for `jax.jit` and its arguments: abstract arrays, a plan for the GPU.

        A row's page table has `width` pages.
        """
        tokens = num_rows if self.is_decode else num_tokens
        tiling = tiling_for(
            device=self.gpu.kind,
            num_cores=self.gpu.num_cores,
            kv_heads=self.kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            kind=self.kind,
            chunk_invariant=self.chunk_invariant,
        )
        capacity = Capacity.of(
            tiling,
            num_tokens=tokens,
            num_rows=num_rows,
            max_context=width * self.page_size,
            is_decode=self.is_decode,
        )

        def array(dtype: str, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        options = dict(self.options)
        row, pages = array("int32", num_rows), (2, num_pages, self.kv_heads, self.page_size)
        arguments: dict[str, Any] = dict(
            q=array(self.dtype, tokens, self.kv_heads * self.group, self.head_dim),
            k_pages=array(self.page_dtype, *pages, self.head_dim),
            v_pages=array(self.page_dtype, *pages, self.head_dim),
            layer=array("int32"),
            rows=Rows(row, row, row, row, array("int32", num_rows, width)),
            plan=no_work(tiling, capacity),
        )
        if options.pop("has_sinks", False):
            arguments["sinks"] = array("float32", self.kv_heads * self.group)
        if options.pop("has_alibi", False):
            arguments["alibi_slopes"] = array("float32", self.kv_heads * self.group)
        if self.page_dtype != self.dtype:
            arguments["k_scales"] = arguments["v_scales"] = array("float32", *pages)
        longest = 1 if self.is_decode else None
        # None, so that a configuration also checks that Triton is the platform's choice.
        name = None if self.kind == "triton" else self.kind
        call = partial(paged_attention, max_query_length=longest, implementation=name, **options)
        return call, arguments


# Every head size with every page size; other values rotate, so that many pairs are covered.
CONFIGURATIONS = tuple(
    Configuration(
        head_dim=head_dim,
        page_size=page_size,
        kv_heads=_HEADS[(i + i // 4) % 4][0],
        group=_HEADS[(i + i // 4) % 4][1],
        dtype=_DTYPES[i % 5][0],
        page_dtype=_DTYPES[i % 5][1],
        options=tuple(_OPTIONS[(i + i // 16) % 4].items()),
        is_decode=is_decode,
    )
    for i, (head_dim, page_size) in enumerate(product(HEAD_DIMS, PAGE_SIZES))
    for is_decode in (False, True)
)

# With all rows in the split kernel: every head size and dtype; decoding compiles the same kernels.
INVARIANT_CONFIGURATIONS = tuple(
    Configuration(
        head_dim=head_dim,
        page_size=PAGE_SIZES[(i + i // 5) % 4],
        kv_heads=_HEADS[(i + i // 4) % 4][0],
        group=_HEADS[(i + i // 4) % 4][1],
        dtype=dtype,
        page_dtype=page_dtype,
        options=tuple(_OPTIONS[(i + i // 4) % 4].items()),
        is_decode=i % 2 == 1,
        chunk_invariant=True,
    )
    for i, (head_dim, (dtype, page_dtype)) in enumerate(product((64, 128, 256), _DTYPES))
)

# For the Mosaic kernel: every head size with pages smaller than a block of keys, as large, and
# larger; other values rotate.
_MOSAIC_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": 1000},
    {"soft_cap": 30.0},
    {"sliding_window": 77, "soft_cap": 50.0},
)
MOSAIC_CONFIGURATIONS = tuple(
    Configuration(
        head_dim=head_dim,
        page_size=page_size,
        kv_heads=_HEADS[(i + i // 4) % 4][0],
        group=_HEADS[(i + i // 4) % 4][1],
        dtype=("bfloat16", "float16")[i % 2],
        page_dtype=("bfloat16", "float16")[i % 2],
        options=tuple(_MOSAIC_OPTIONS[(i + i // 5) % 4].items()),
        is_decode=is_decode,
        kind="mosaic",
    )
    for i, (head_dim, page_size) in enumerate(product((64, 128), (16, 32, 64, 128, 256)))
    for is_decode in (False, True)
)

# Options of few models, at every head size and in every dtype: ALiBi alone, and pairs of the
# options that change the logits.
_ALIBI, _WINDOW, _CAP = {"has_alibi": True}, {"sliding_window": 1000}, {"soft_cap": 30.0}
_RARE_OPTIONS: tuple[dict[str, Any], ...] = (
    _ALIBI,
    {**_ALIBI, **_WINDOW},
    {**_ALIBI, **_CAP},
    {**_WINDOW, **_CAP},
)
RARE_CONFIGURATIONS = tuple(
    Configuration(
        head_dim=head_dim,
        page_size=PAGE_SIZES[(i + i // 5) % 4],
        kv_heads=_HEADS[(i + i // 4) % 4][0],
        group=_HEADS[(i + i // 4) % 4][1],
        dtype=dtype,
        page_dtype=page_dtype,
        options=tuple(options.items()),
        is_decode=False,
    )
    for i, (head_dim, (dtype, page_dtype), options) in enumerate(
        product((64, 128, 256), _DTYPES, _RARE_OPTIONS)
    )
)
