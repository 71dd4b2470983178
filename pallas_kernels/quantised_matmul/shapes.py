"""Named shapes for the tests and the benchmarks of products with packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxserve.kernels.quantised_matmul.api import quantised_matmul
from jaxserve.kernels.quantised_matmul.packing import (
    PackedMatrix,
    Rounding,
    quantise,
    quantise_float8,
)


@final
@dataclass(frozen=True, kw_only=True)
class ProductFormat:
    """The format of a weight, and the rounding of its activations."""

    bits: int
    group: int = 32
    has_minima: bool = False
    is_float: bool = False
    rounds_activations: Rounding | None = None

    def packed(self, matrix: jax.Array) -> PackedMatrix:
        """Return a weight [*lead, out, in] in this format."""
        if self.is_float:
            return quantise_float8(matrix, group=self.group)
        return quantise(matrix, bits=self.bits, group=self.group, has_minima=self.has_minima)


FORMATS = MappingProxyType(
    {
        "w4a16": ProductFormat(bits=4, has_minima=True),
        "w4a16_g128": ProductFormat(bits=4, group=128),
        "w8a16": ProductFormat(bits=8),
        "fp8": ProductFormat(bits=8, is_float=True),
        "w8a8": ProductFormat(bits=8, rounds_activations="tokens"),
    }
)


@final
@dataclass(frozen=True, kw_only=True)
class ProductShape:
    """A product of activations [tokens, depth] with a weight [depth, *lead, width]."""

    name: str
    tokens: int
    depth: int
    width: int
    lead: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return self.name

    @property
    def weight(self) -> tuple[int, ...]:
        """The shape that `ProductFormat.packed` takes."""
        return (*self.lead, self.width, self.depth)


def _gate_up(tokens: int) -> ProductShape:
    name = f"llama3_8b_gate_up_{tokens}"
    return ProductShape(name=name, tokens=tokens, depth=4096, width=14336, lead=(2,))


def _down(tokens: int) -> ProductShape:
    return ProductShape(name=f"llama3_8b_down_{tokens}", tokens=tokens, depth=14336, width=4096)


# Llama 3 8B's products, for steps of few and of many tokens, and odd sizes.
GPU_SHAPES = (
    *(_gate_up(tokens) for tokens in (1, 16, 64, 4096)),
    *(_down(tokens) for tokens in (16, 4096)),
    ProductShape(name="llama3_8b_qkv_16", tokens=16, depth=4096, width=128, lead=(8, 6)),
    ProductShape(name="llama3_8b_out_16", tokens=16, depth=4096, width=4096),
    ProductShape(name="llama3_8b_head_16", tokens=16, depth=4096, width=128256),
    ProductShape(name="qwen3_30b_out_512", tokens=512, depth=4096, width=2048),
    ProductShape(name="uneven_37", tokens=37, depth=2880, width=1000, dtype="float16"),
    ProductShape(name="uneven_300", tokens=300, depth=2880, width=1000, dtype="float16"),
)


@final
@dataclass(frozen=True)
class Configuration:
    format: str
    shape: ProductShape
    kernels = frozenset({"quantised_matmul"})
    donated = ()

    def __str__(self) -> str:
        return f"quantised_matmul-{self.format}-{self.shape}"

    def call(self) -> tuple[Any, dict[str, Any]]:
        format, shape = FORMATS[self.format], self.shape
        matrix = jax.ShapeDtypeStruct(shape.weight, jnp.dtype("float32"))
        return partial(quantised_matmul, rounds_activations=format.rounds_activations), {
            "x": jax.ShapeDtypeStruct((shape.tokens, shape.depth), jnp.dtype(shape.dtype)),
            "weight": jax.eval_shape(format.packed, matrix),
        }


def make_inputs(configuration: Configuration, seed: int) -> dict[str, Any]:
    """Return random activations and a random weight, made on the device."""
    format, shape = FORMATS[configuration.format], configuration.shape
    keys = jax.random.split(jax.random.key(seed))
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    x = normal(keys[0], (shape.tokens, shape.depth), jnp.dtype(shape.dtype))
    weight = normal(keys[1], shape.weight, jnp.dtype("bfloat16"))
    return {"x": x, "weight": jax.jit(format.packed)(weight)}


CONFIGURATIONS = tuple(Configuration(format, shape) for format in FORMATS for shape in GPU_SHAPES)
# Timed on a CPU.
SMALL_CONFIGURATIONS = tuple(
    Configuration(format, ProductShape(name="smollm2_out_4", tokens=4, depth=576, width=576))
    for format in FORMATS
)
