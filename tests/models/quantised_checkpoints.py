"""Tiny Llama folders with weights in few bits, packed number by number, and the same in float32."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
Numbers = dict[str, np.ndarray]

_CONFIG = dict(
    model_type="llama",
    vocab_size=101,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A random matrix [out, in]: codes, scales and zero points [out, groups], group of each input.

    The number at [n, k] is (codes[n, k] - zeros[n, g[k]]) * scales[n, g[k]].
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    @property
    def numbers(self) -> np.ndarray:
        codes, zeros = self.codes.astype(np.float32), self.zeros.astype(np.float32)
        return (codes - zeros[:, self.groups]) * self.scales.astype(np.float32)[:, self.groups]


def draw(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int,
    group: int,
    is_symmetric: bool = False,
    order: np.ndarray | None = None,
    scale_dtype: Any = np.float16,
) -> Drawn:
    """Draw a matrix whose numbers have a variance of about 1 / in."""
    out, width = shape
    group = width if group == -1 else group
    num_groups = width // group
    unit = 3 / (2**bits * np.sqrt(width))
    groups = np.arange(width) // group
    zeros = rng.integers(0, 2**bits, (out, num_groups))
    if is_symmetric:
        zeros[...] = 2 ** (bits - 1)
    return Drawn(
        codes=rng.integers(0, 2**bits, shape),
        scales=(unit * rng.uniform(0.5, 2, (out, num_groups))).astype(scale_dtype),
        zeros=zeros,
        groups=groups if order is None else groups[order],
        bits=bits,
    )


# ---- packing ----


def packed(numbers: np.ndarray, bits: int, places: list[int] | None = None) -> np.ndarray:
    """Pack the last axis into int32 words; place i of a word has column places[i] of its columns.

    Columns that fill up the last word are zeros.
    """
    each = 32 // bits
    places = places or list(range(each))
    *rows, columns = numbers.shape
    words = np.zeros((*rows, -(-columns // each)), np.uint32)
    for column in range(columns):
        place = places.index(column % each)
        words[..., column // each] |= numbers[..., column].astype(np.uint32) << (place * bits)
    return words.view(np.int32)


def gptq(module: str, m: Drawn, *, one_less: bool = True) -> Arrays:
    """Return a module's tensors as AutoGPTQ writes them."""
    return {
        f"{module}.qweight": np.ascontiguousarray(packed(m.codes, m.bits).T),
        f"{module}.qzeros": packed((m.zeros.T - one_less) % 2**m.bits, m.bits),
        f"{module}.scales": np.ascontiguousarray(m.scales.T),
        f"{module}.g_idx": m.groups.astype(np.int32),
    }


def awq(module: str, m: Drawn) -> Arrays:
    """Return a module's tensors as AutoAWQ writes them, version gemm."""
    places = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        f"{module}.qweight": packed(m.codes.T, 4, places),
        f"{module}.qzeros": packed(m.zeros.T, 4, places),
        f"{module}.scales": np.ascontiguousarray(m.scales.T),
    }


def pack_quantized(module: str, m: Drawn) -> Arrays:
    """Return a module's tensors as compressed-tensors writes packed integers."""
    tensors = {
        f"{module}.weight_packed": packed(m.codes, m.bits),
        f"{module}.weight_scale": m.scales,
        f"{module}.weight_shape": np.asarray(m.codes.shape, np.int64),
    }
    if (m.zeros != 2 ** (m.bits - 1)).any():
        words = packed(m.zeros.T, m.bits).T
        tensors[f"{module}.weight_zero_point"] = np.ascontiguousarray(words)
    if (np.diff(m.groups) < 0).any():
        tensors[f"{module}.weight_g_idx"] = m.groups.astype(np.int32)
    return tensors


def int_quantized(module: str, m: Drawn) -> Arrays:
    """Return a module's tensors as compressed-tensors writes int8."""
    return {
        f"{module}.weight": (m.codes - 128).astype(np.int8),
        f"{module}.weight_scale": m.scales,
        f"{module}.weight_zero_point": (m.zeros - 128).astype(np.int8),
    }


@dataclass(frozen=True, kw_only=True)
class DrawnFloats:
    """A matrix [out, in] in float8 with a scale for each block of outputs and inputs."""

    codes: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    @property
    def numbers(self) -> np.ndarray:
        rows, columns = self.block
        whole = np.repeat(np.repeat(self.scales, rows, 0), columns, 1)
        return self.codes.astype(np.float32) * whole[: len(self.codes)]


def in_blocks(matrix: Drawn, block: tuple[int, int]) -> DrawnFloats:
    """Return a matrix rounded to float8; a block of -1 is the whole axis."""
    numbers = matrix.numbers
    out, width = numbers.shape
    rows, columns = (
        n if size == -1 else size for n, size in zip(numbers.shape, block, strict=True)
    )
    padded = np.zeros((-(-out // rows) * rows, width), np.float32)
    padded[:out] = numbers
    blocks = padded.reshape(len(padded) // rows, rows, width // columns, columns)
    scales = (np.abs(blocks).max((1, 3)) / 300).astype(np.float32)
    whole = np.repeat(np.repeat(scales, rows, 0), columns, 1)[:out]
    codes = (numbers / whole).astype(ml_dtypes.float8_e4m3fn)
    return DrawnFloats(codes=codes, scales=scales, block=(rows, columns))


def float8(module: str, m: DrawnFloats, *, scale: str = "weight_scale") -> Arrays:
    """Return a module's tensors as compressed-tensors and others write float8."""
    return {f"{module}.weight": m.codes, f"{module}.{scale}": m.scales}


@dataclass(frozen=True, kw_only=True)
class DrawnE2M1:
    """A matrix [out, in] of numbers of four bits, by their code, with a scale [out, groups]."""

    codes: np.ndarray
    scales: np.ndarray  # as stored: float8, or exponents plus 127
    divisor: np.ndarray | None  # of all scales, [1]; None with exponents

    @property
    def numbers(self) -> np.ndarray:
        if self.divisor is None:
            scales = np.float32(2) ** (self.scales.astype(np.float32) - 127)
        else:
            scales = self.scales.astype(np.float32) / self.divisor
        group = self.codes.shape[1] // scales.shape[1]
        return E2M1[self.codes] * np.repeat(scales, group, 1)


_POSITIVE = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)


def in_e2m1(matrix: Drawn, *, is_nvfp4: bool, has_power: bool = False) -> DrawnE2M1:
    """Return a matrix with random codes, and scales of about the given one's.

    With `has_power` the divisor is a power of two, whose inverse is exact.
    """
    scales = np.abs(matrix.scales.astype(np.float32))
    if not is_nvfp4:
        return DrawnE2M1(
            codes=matrix.codes,
            scales=(np.round(np.log2(scales)) + 127).astype(np.uint8),
            divisor=None,
        )
    divisor = np.array([448 / scales.max()], np.float32)
    if has_power:
        divisor = 2 ** np.floor(np.log2(divisor))
    return DrawnE2M1(
        codes=matrix.codes,
        scales=(scales * divisor).astype(ml_dtypes.float8_e4m3fn),
        divisor=divisor,
    )


def float4(module: str, m: DrawnE2M1) -> Arrays:
    """Return a module's tensors as compressed-tensors 0.20.1 packs NVFP4 and MXFP4."""
    tensors = {
        f"{module}.weight_packed": (m.codes[:, ::2] | m.codes[:, 1::2] << 4).astype(np.uint8),
        f"{module}.weight_scale": m.scales,
    }
    return tensors if m.divisor is None else tensors | {f"{module}.weight_global_scale": m.divisor}


def modelopt(module: str, m: DrawnE2M1) -> Arrays:
    """Return a module's tensors as ModelOpt writes NVFP4."""
    assert m.divisor is not None
    return {
        f"{module}.weight": (m.codes[:, ::2] | m.codes[:, 1::2] << 4).astype(np.uint8),
        f"{module}.weight_scale": m.scales,
        f"{module}.weight_scale_2": (1 / m.divisor).astype(np.float32).reshape(()),
        f"{module}.input_scale": np.array(0.5, np.float32),
    }


def eight_bits(module: str, m: Drawn) -> Arrays:
    """Return a module's tensors as bitsandbytes 0.50.2 writes LLM.int8()."""
    return {
        f"{module}.weight": (m.codes.astype(np.int16) - 128).astype(np.int8),
        f"{module}.SCB": (m.scales[:, 0] * 127).astype(np.float32),
        f"{module}.weight_format": np.array(0, np.uint8),
    }


def with_short_scales(matrix: Drawn) -> Drawn:
    """Return a matrix with scales of few bits, whose products with 127 are exact."""
    return replace(matrix, scales=np.ceil(matrix.scales * 4096).astype(np.float32) / 4096)


@dataclass(frozen=True, kw_only=True)
class DrawnTable:
    """A matrix [out, in] of codes of a table, in blocks of 64 numbers with a scale each.

    With `nested`, scales are bytes: codes of its table, times the scale of their block, plus an
    offset.
    """

    codes: np.ndarray
    table: np.ndarray
    scales: np.ndarray
    nested: tuple[np.ndarray, np.ndarray, float] | None

    @property
    def numbers(self) -> np.ndarray:
        scales = self.scales
        if self.nested is not None:
            table, whole, offset = self.nested
            scales = table[scales] * np.repeat(whole, 256)[: len(scales)] + np.float32(offset)
        each = np.repeat(scales, 64)[: self.codes.size]
        return self.table[self.codes] * each.reshape(self.codes.shape)


def in_table(matrix: Drawn, *, is_nested: bool) -> DrawnTable:
    """Return a matrix with the given one's codes, random tables and random scales."""
    rng = np.random.default_rng(int(matrix.codes[0, 0]))
    count = -(-matrix.codes.size // 64)
    scales = rng.uniform(0.1, 0.3, count).astype(np.float32)
    nested = None
    if is_nested:
        scales = rng.integers(0, 256, count, np.uint8)
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        nested = table, rng.uniform(0.05, 0.1, -(-count // 256)).astype(np.float32), 0.2
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    return DrawnTable(codes=matrix.codes, table=table, scales=scales, nested=nested)


def bitsandbytes(module: str, m: DrawnTable) -> Arrays:
    """Return a module's tensors as bitsandbytes 0.50.2 writes NF4."""
    codes = m.codes.reshape(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(m.codes.shape)}
    weight = f"{module}.weight"
    tensors = {
        weight: (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"{weight}.absmax": m.scales,
        f"{weight}.quant_map": m.table,
    }
    if m.nested is not None:
        table, whole, offset = m.nested
        state |= {"nested_blocksize": 256, "nested_offset": offset}
        tensors |= {f"{weight}.nested_quant_map": table, f"{weight}.nested_absmax": whole}
    octets = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors | {f"{weight}.quant_state.bitsandbytes__nf4": octets}


def compressed(format: str, bits: int, group: int, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    scheme = {
        "num_bits": bits,
        "type": "int",
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        **weights,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


# ---- folders ----


def module_shapes(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Return [out, in] of every weight of the layers."""
    head_dim = hidden // _CONFIG["num_attention_heads"]
    narrow = head_dim * _CONFIG["num_key_value_heads"]
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(_CONFIG["num_hidden_layers"])
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items()
    }


def write_folders(
    parent: Path,
    config: Mapping[str, Any],
    write: Callable[[str, Any], Arrays],
    *,
    hidden: int = 64,
    inner: int = 96,
    acts_in_order: bool = True,
    change: Callable[[Drawn], Drawn | DrawnFloats | DrawnE2M1 | DrawnTable] = lambda matrix: matrix,
    seed: int = 0,
    **drawn: Any,
) -> tuple[Path, Path, Numbers]:
    """Write a model as `parent`/quantised and as `parent`/dense, which has the same numbers.

    Args:
      config: the quantization_config.
      acts_in_order: otherwise each weight's groups have random inputs, the same for weights with
        the same input.
      change: applied to each matrix that was drawn.
      drawn: arguments of `draw`.

    Returns:
      Both folders, and the numbers of each quantised weight [out, in].
    """
    rng = np.random.default_rng(seed)
    tensors, numbers = {}, {}
    orders: dict[str, np.ndarray] = {}
    for module, shape in module_shapes(hidden, inner).items():
        order = None
        if not acts_in_order:
            layer, _, last = module.rpartition(".")
            with_same_input = layer + str(last in ("o_proj", "down_proj"))
            order = orders.setdefault(with_same_input, rng.permutation(shape[1]))
        matrix = change(draw(rng, shape, order=order, **drawn))
        tensors |= write(module, matrix)
        numbers[f"{module}.weight"] = matrix.numbers
    others = {
        "model.embed_tokens.weight": rng.standard_normal((101, hidden)),
        "lm_head.weight": rng.standard_normal((101, hidden)) * hidden**-0.5,
        "model.norm.weight": np.ones(hidden),
    }
    for layer in range(_CONFIG["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            others[f"model.layers.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, hidden)
    plain = {name: array.astype(np.float32) for name, array in others.items()}
    sizes = {**_CONFIG, "hidden_size": hidden, "intermediate_size": inner}
    quantised, dense = parent / "quantised", parent / "dense"
    write_folder(quantised, {**sizes, "quantization_config": dict(config)}, plain | tensors)
    write_folder(dense, sizes, plain | numbers)
    return quantised, dense, numbers


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Arrays) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save(tensors, folder / "model.safetensors")


def save(tensors: Arrays, path: Path) -> None:
    """Write a safetensors file, which may have float8 tensors too."""
    names = {
        "float8_e4m3fn": "F8_E4M3",
        "bfloat16": "BF16",
        "int8": "I8",
        "int32": "I32",
        "uint8": "U8",
    }
    names |= {"int64": "I64", "float16": "F16", "float32": "F32"}
    names |= {"float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    header, parts, at = {}, [], 0
    for name, array in tensors.items():
        octets = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(octets)],
        }
        parts.append(octets)
        at += len(octets)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
