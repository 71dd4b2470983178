"""The steps that `make kernel-gate` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.options import KV_DTYPES
from jaxserve.models.decoder import LayerLayout


@final
@dataclass(frozen=True)
class Steps:
    """A mixed step and a decode loop.

    Attributes:
      layout: layout of the layers; unrolled layers compile far more slowly.
      kv_dtype: dtype of pages; None for the model's dtype.
      dtype: dtype of the model.
      attention: the option `attention`; None for the platform's choice.
      quantize: the option `quantize`; None for weights in the model's dtype.
      deterministic: the option `deterministic`.
      is_llama_3_8b: whether it has the sizes of Llama 3 8B; otherwise a small Llama's.
      num_shards: devices over which its tensors are split.
      max_slots: rows of the decode loop.
    """

    layout: LayerLayout
    kv_dtype: str | None = None
    dtype: str = "bfloat16"
    attention: str | None = None
    quantize: str | None = None
    deterministic: bool = False
    is_llama_3_8b: bool = False
    num_shards: int = 1
    max_slots: int = 64

    @property
    def num_layers(self) -> tuple[int, int]:
        """Two numbers of layers; what a layer adds is known from the difference."""
        return (2, 3) if self.is_llama_3_8b else (3, 5)

    @property
    def config(self) -> dict[str, Any]:
        """The model's sizes."""
        if self.is_llama_3_8b:
            sizes = (128256, 4096, 14336, 32, 8)
        else:
            sizes = (32000, 1024, 2816, 8, 2)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        return dict(zip(names, sizes, strict=True))

    def __str__(self) -> str:
        parts = ["Llama 3 8B"] if self.is_llama_3_8b else []
        parts += [self.layout]
        parts += [] if self.num_shards == 1 else [f"{self.num_shards} devices"]
        parts += [] if self.max_slots == 64 else [f"{self.max_slots} slots"]
        parts += [] if self.kv_dtype is None else [f"{self.kv_dtype} pages"]
        parts += [] if self.dtype == "bfloat16" else [self.dtype]
        parts += [] if self.attention is None else [self.attention]
        parts += [] if self.quantize is None else [f"{self.quantize} weights"]
        parts += ["deterministic"] if self.deterministic else []
        return ", ".join(parts)


_LLAMA_3_8B = tuple(
    Steps("unrolled", kv_dtype, is_llama_3_8b=True, num_shards=num_shards)
    for num_shards in (1, 8)
    for kv_dtype in (None, "float8_e4m3fn")
)
STEPS_OF_SUBSET = (
    *(Steps("unrolled", kv_dtype) for kv_dtype in (None, *KV_DTYPES)),
    _LLAMA_3_8B[0],
    Steps("scanned"),
    Steps("unrolled", quantize="int4"),
    Steps("unrolled", deterministic=True, is_llama_3_8b=True),
)
STEPS = (
    *STEPS_OF_SUBSET,
    *_LLAMA_3_8B[1:],
    Steps("unrolled", is_llama_3_8b=True, max_slots=256),
    *(Steps("scanned", kv_dtype) for kv_dtype in KV_DTYPES),
    Steps("scanned", dtype="float32"),
    Steps("scanned", attention="mosaic,triton"),
    Steps("unrolled", attention="mosaic,triton", is_llama_3_8b=True),
    *(Steps("unrolled", quantize=kind) for kind in ("int8", "fp8", "w8a8")),
    Steps("scanned", quantize="int4"),
    Steps("scanned", deterministic=True, dtype="float32"),
)
