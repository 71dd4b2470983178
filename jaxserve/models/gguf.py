"""Models in GGUF files: the header, the blocks of quantised tensors, and the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, final

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from jaxserve.core.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from jaxserve.models.families import config_from_hf, family_of
from jaxserve.models.gguf_architectures import Facts, config_of

Rows = UInt8[np.ndarray, "*rows row_bytes"]
Part = Literal["codes", "scales", "minima"]


@final
@dataclass(frozen=True)
class Blocks:
    """The numbers of some rows: `scales * codes + minima`, group by group."""

    codes: Int[np.ndarray, "*rows length"]  # [*rows, length]; signed unless there are minima
    scales: Float[np.ndarray, "*rows groups"]  # [*rows, length / group]
    minima: Float[np.ndarray, "*rows groups"] | None  # as scales; None for zeros


@final
@dataclass(frozen=True)
class BlockType:
    """The storage of numbers in a ggml type."""

    bits: int  # bits of a code in memory: 4 or 8
    group: int  # numbers that share a scale
    has_minima: bool  # whether they share a minimum too
    has_halves: bool  # whether scales and minima are float16 numbers; else they need float32
    decode: Callable[[Rows], Blocks]


def _q8_0(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Blocks(_joined(codes), _halves(blocks[..., :2]), None)


def _q4_0(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 18)
    codes = _nibbles(blocks[..., 2:]).astype(np.int8) - np.int8(8)
    return Blocks(_joined(codes), _halves(blocks[..., :2]), None)


def _q4_1(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 20)
    codes = _nibbles(blocks[..., 4:]).astype(np.int8)
    return Blocks(_joined(codes), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q4_k(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 144)
    whole, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    codes = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    codes = np.stack([codes & 15, codes >> 4], axis=-2).astype(np.int8)
    scales = whole.astype(np.float32)[..., None] * scales.astype(np.float32)
    minima = -(least.astype(np.float32)[..., None] * minima.astype(np.float32))
    return Blocks(_joined(codes, 3), _joined(scales), _joined(minima))


def _q6_k(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = (low >> np.array([0, 4], np.uint8)[:, None]) & 15  # [..., 2, 2, 64]
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3  # [..., 2, 4, 32]
    codes = low.reshape(high.shape) | (high << 4)
    codes = codes.astype(np.int8) - np.int8(32)
    steps = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scales = _halves(blocks[..., 208:]).astype(np.float32)[..., None] * steps
    return Blocks(_joined(codes, 3), _joined(scales), None)


def _mxfp4(rows: Rows) -> Blocks:
    blocks = rows.reshape(*rows.shape[:-1], -1, 17)
    # The numbers are halves of whole ones, so the scale is half of two to the exponent.
    codes = _E2M1_DOUBLED[_nibbles(blocks[..., 1:])]
    return Blocks(_joined(codes), np.ldexp(np.float32(1), blocks[..., 0].astype(int) - 128), None)


_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q8_0": BlockType(8, 32, False, True, _q8_0),
        "Q4_0": BlockType(4, 32, False, True, _q4_0),
        "Q4_1": BlockType(4, 32, True, True, _q4_1),
        "Q4_K": BlockType(4, 32, True, False, _q4_k),
        "Q6_K": BlockType(8, 16, False, False, _q6_k),
        "MXFP4": BlockType(8, 32, False, False, _mxfp4),
    }
)


@final
@dataclass(frozen=True)
class CommonForm:
    """A form that holds the numbers of several block types exactly, for tensors that are fused.

    Types of 4 bits with and without minima have float32 scales together: the minima of the latter
    are -8 scales, which may be more than float16 holds. For attributes see `BlockType`.
    """

    bits: int
    group: int
    has_minima: bool
    has_halves: bool

    @classmethod
    def of(cls, types: Sequence[BlockType]) -> CommonForm:
        bits, have_minima = max(each.bits for each in types), {each.has_minima for each in types}
        return cls(
            bits,
            min(each.group for each in types),
            any(have_minima),
            all(each.has_halves for each in types) and (bits > 4 or len(have_minima) == 1),
        )

    def part(self, name: Part, kind: BlockType, rows: Rows, unit: int = 1) -> np.ndarray:
        """Return codes (uint8), scales or minima (float32) of a `PackedMatrix` of this form.

        One scale or minimum is returned for each `unit` numbers; it divides the groups.
        """
        blocks = kind.decode(rows)
        is_shifted = self.bits == 4 and not kind.has_minima  # from -8 .. 7 to 0 .. 15
        if name == "codes":
            shift = 128 if self.bits == 8 else 8 if is_shifted else 0
            return blocks.codes.view(np.uint8) + np.uint8(shift)
        scales = blocks.scales.astype(np.float32)
        if name == "minima":
            if blocks.minima is not None:
                scales = blocks.minima.astype(np.float32)
            else:
                scales = scales * np.float32(-8 if is_shifted else 0)
        return np.repeat(scales, kind.group // unit, axis=-1)


def _halves(pairs: UInt8[np.ndarray, "*blocks 2"]) -> Float[np.ndarray, "*blocks"]:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0]


def _nibbles(packed: UInt8[np.ndarray, "*blocks n"]) -> UInt8[np.ndarray, "*blocks m"]:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _joined(x: np.ndarray, axes: int = 1) -> np.ndarray:
    """Return `x` with its blocks, and the next `axes` axes, in one axis."""
    return x.reshape(*x.shape[: -axes - 1], -1)


MAGIC = b"GGUF"
_REMEDY = "the file is damaged or was cut off; download or copy it again"
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
# Element types that need no dequantisation: ggml type number -> (name, bytes).
PLAIN_TYPES = {0: ("F32", 4), 1: ("F16", 2), 28: ("F64", 8), 30: ("BF16", 2)}


@final
@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in the file. `shape` is in row-major order: [out, in] for a matrix."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@final
class GGUFFile:
    """Metadata and tensor directory of a GGUF file; the data stay on disk (memory-mapped).

    Attributes:
      metadata: key -> Python scalar, string, list of strings, or NumPy array.
      tensors: name -> `TensorInfo`; all of them are inside the file.

    Raises:
      CheckpointError: not a GGUF file, cut off, or damaged; every misplaced tensor is listed.
      UnsupportedModelError: a version or tensor type that is not supported.
      MissingExtraError: quantised tensors without the `gguf` package.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    self._fail(f"is {size} bytes long, too short for a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                str(self.path), [f"cannot be opened: {error}"], "check the path and permissions"
            ) from error
        self._size = size
        self._position = 0
        self.metadata: Mapping[str, object]
        self.tensors: Mapping[str, TensorInfo]
        self._read_header()

    def rows(self, info: TensorInfo) -> UInt8[np.ndarray, "rows row_bytes"]:
        """Return the stored bytes of a tensor, a view of the file."""
        # The pages of earlier tensors count as this process's memory while they are mapped.
        self._map.madvise(mmap.MADV_DONTNEED)
        data = np.frombuffer(self._map, np.uint8, info.size_bytes, info.offset)
        return data.reshape(info.num_rows, info.row_bytes)

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(str(self.path), [problem], _REMEDY)

    def _read_header(self) -> None:
        magic = self._take(4)
        if magic != MAGIC:
            self._fail(f"starts with {magic!r} instead of {MAGIC!r}: not a GGUF file")
        version = self._scalar("<u4")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version}; little-endian versions 2 and 3 are "
                "supported. Convert it again with a current llama.cpp"
            )
        num_tensors, num_keys = self._scalar("<u8"), self._scalar("<u8")
        # A key takes at least 13 bytes and a tensor 24, which bounds their counts.
        if num_keys * 13 + num_tensors * 24 > self._size:
            self._fail(f"claims {num_tensors} tensors and {num_keys} keys, more than it can hold")
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<u4"))
        self.metadata = metadata
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self._position // alignment) * alignment
        self.tensors = self._placed(entries, data_start)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("<u4")
        if not 1 <= num_dims <= 8:
            self._fail(f"tensor {name!r} claims {num_dims} dimensions")
        dims = tuple(self._scalar("<u8") for _ in range(num_dims))
        ggml_type, offset = self._scalar("<u4"), self._scalar("<u8")
        return name, dims[::-1], ggml_type, offset

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int
    ) -> dict[str, TensorInfo]:
        block_sizes = self._block_sizes({ggml_type for _, _, ggml_type, _ in entries})
        tensors: dict[str, TensorInfo] = {}
        problems = []
        for name, shape, ggml_type, offset in entries:
            type_name, block, block_bytes = block_sizes[ggml_type]
            if shape[-1] % block:
                problems.append(
                    f"tensor {name!r}: rows of {shape[-1]} are not whole {type_name} blocks"
                )
                continue
            row_bytes = shape[-1] // block * block_bytes
            info = TensorInfo(name, shape, ggml_type, type_name, data_start + offset, row_bytes)
            # Python integers, which do not wrap around for a corrupt shape.
            end = info.offset + row_bytes
            for dim in shape[:-1]:
                end = info.offset + (end - info.offset) * dim
            if end > self._size:
                problems.append(
                    f"tensor {name!r} ends at byte {end}, but the file has {self._size}"
                )
            if name in tensors:
                problems.append(f"tensor {name!r} is listed twice")
            tensors[name] = info
        if problems:
            raise CheckpointError(str(self.path), problems, _REMEDY)
        return tensors

    def _block_sizes(self, types: set[int]) -> dict[int, tuple[str, int, int]]:
        """Return, by ggml type, the name, the values in a block and the bytes in a block."""
        known = {number: (name, 1, size) for number, (name, size) in PLAIN_TYPES.items()}
        if types - known.keys():
            try:
                from gguf.constants import GGML_QUANT_SIZES
            except ImportError as error:
                raise MissingExtraError(
                    "gguf", "gguf", f"reading the quantised tensors of {self.path}"
                ) from error
            known |= {int(t): (t.name, *sizes) for t, sizes in GGML_QUANT_SIZES.items()}
        if types - known.keys():
            raise UnsupportedModelError(
                f"{self.path} holds tensors of ggml type {sorted(types - known.keys())}, which the "
                "installed `gguf` package does not know; upgrade it, or the file is damaged"
            )
        return known

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > self._size:
            self._fail(
                f"the header needs {num_bytes} bytes at byte {self._position}, "
                f"but the file has {self._size}"
            )
        data = self._map[self._position : end]
        self._position = end
        return data

    def _scalar(self, dtype: str) -> int:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize), dtype)[0].item()

    def _string(self) -> str:
        return self._take(self._scalar("<u8")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            self._fail(f"holds a value of unknown type {kind} before byte {self._position}")
        item, count = self._scalar("<u4"), self._scalar("<u8")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if item != _STRING or count * 8 > self._size:
            self._fail(f"holds an array of {count} values of type {item}")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        # The vocabulary is so large that it has its own loop.
        unpack, data, position = struct.Struct("<Q").unpack_from, self._map, self._position
        strings = []
        for _ in range(count):
            if position + 8 > self._size:
                self._fail("ends inside an array of strings")
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > self._size:
                self._fail("ends inside an array of strings")
            strings.append(data[start:position].decode("utf-8", errors="replace"))
        self._position = position
        return strings


_PLAIN_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Tables of the rotary embedding, whose parameters are in the metadata or recovered from it.
_ROPE_TABLES = (
    "rope_freqs.weight",
    "attn_rot_embd.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


@final
class GGUFSource:
    """A `WeightSource` over one GGUF file, which reads one tensor at a time.

    llama.cpp's names, orders of rows and shapes become those of Hugging Face (`Architecture`).

    Attributes:
      where: the path, for error messages.
      file: the header, with `metadata` for the tokenizer.
      config: the fields of the model's config.json, for `families.config_from_hf`.

    Raises:
      CheckpointError: not a GGUF file, cut off, damaged, or without a key that it needs.
      UnsupportedModelError: another architecture, or tensors that its family does not use.
      MissingExtraError: the `gguf` package is not installed.
    """

    def __init__(self, path: str | Path):
        self.where = str(path)
        self.file = GGUFFile(path)
        shapes = {name: info.shape for name, info in self.file.tensors.items()}
        facts = Facts(self.where, self.file.metadata, shapes, self._rope_factors())
        self._architecture = facts.architecture
        self.config: Mapping[str, Any] = config_of(facts)
        self._tensors = self._named(facts)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor by its Hugging Face name; matrices are [out, in]."""
        return {name: info.shape for name, info in self._tensors.items()}

    def dtypes(self) -> Mapping[str, str]:
        return {name: info.type_name for name, info in self._tensors.items()}

    def type_name(self, name: str) -> str:
        """Return the type in which the rows of a tensor can be kept."""
        axis, _ = self._order(name)
        return "F32" if axis else self._tensors[name].type_name  # its blocks are torn apart

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or its part at `index` (unit steps); dequantises only its rows.

        Quantised tensors are float32, others have their stored dtype.

        Raises:
          CheckpointError: no such tensor, or its blocks cannot be dequantised.
        """
        return self._architecture.original(name, self.read_as(self._dequantised, name, index))

    def read_as(
        self,
        decode: Callable[[TensorInfo, UInt8[np.ndarray, "*rows row_bytes"]], np.ndarray],
        name: str,
        index: tuple[slice, ...] | None = None,
    ) -> np.ndarray:
        """Return a tensor, or its part at `index`, with its stored rows decoded by `decode`."""
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(
                self.where, [f"tensor {name!r} is missing"], "use a complete GGUF file"
            )
        index = tuple(index or ())
        rows = self.file.rows(info).reshape(*info.shape[:-1], info.row_bytes)
        axis, order = self._order(name)
        if len(info.shape) == 1:
            values = decode(info, rows)
            values = values if order is None else values[order]
            return values[index]
        first = index[0] if index else slice(None)
        picked = rows[first] if order is None or axis else rows[order[first]]
        values = decode(info, picked)
        values = values[:, order] if order is not None and axis else values
        return values[(slice(None), *index[1:])]

    def _named(self, facts: Facts) -> dict[str, TensorInfo]:
        """Return the tensors by the Hugging Face names that the model's family reads."""
        config = config_from_hf(self.config)
        # Names by which a family knows the form of its tensors, as GGUF files have them.
        config = config.fitted_to(
            {
                "model.layers.0.mlp.experts.0.down_proj.weight": (),
                "model.layers.0.linear_attn.in_proj_qkv.weight": (),
            }
        )
        family = family_of(config)
        names = {
            tensor.name.format(layer=layer)
            for weight in family.weights(config).values()
            for tensor in weight.tensors
            for layer in range(config.num_layers)
        }
        translate = self._architecture.names(self.config, self.where)
        tensors: dict[str, TensorInfo] = {}
        used = {translate(name) for name in family.unread(config)}
        for name in sorted(names):
            stored = translate(name)
            info = self.file.tensors.get(stored or "")
            if info is not None and stored is not None:
                used.add(stored)
                tensors[name] = _part_of(info, name)
        unknown = [
            name
            for name in self.file.tensors
            if not (name in used or name.endswith(_ROPE_TABLES) or facts.predicts(name))
        ]
        if unknown:
            raise UnsupportedModelError(
                f"{self.where} holds tensors that {self.config['model_type']!r} models here do not "
                f"use: {unknown[:8]}{' and more' if len(unknown) > 8 else ''}"
            )
        return tensors

    def _order(self, name: str) -> tuple[int, Int[np.ndarray, " places"] | None]:
        order = self._architecture.order(name, self.config)
        if order is None:
            return 0, None
        axis, places = order
        if len(places) != self._tensors[name].shape[axis]:
            raise CheckpointError(
                self.where,
                [
                    f"tensor {name!r} has {self._tensors[name].shape[axis]} places on axis {axis}, "
                    f"and heads of {len(places)}"
                ],
                "the file's head counts and tensors disagree; convert the model again",
            )
        return axis, places

    def _dequantised(
        self, info: TensorInfo, rows: UInt8[np.ndarray, "*rows row_bytes"]
    ) -> Shaped[np.ndarray, "*rows row_length"]:
        if info.ggml_type in PLAIN_TYPES:
            return np.ascontiguousarray(rows).view(_PLAIN_DTYPES[info.type_name])
        try:
            import gguf
        except ImportError as error:
            raise MissingExtraError("gguf", "gguf", f"reading {info.type_name} tensors") from error
        try:
            return gguf.dequantize(rows, gguf.GGMLQuantizationType(info.ggml_type))
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.where}: tensor {info.name!r} has type {info.type_name}, which the `gguf` "
                "package cannot dequantise; use another quantisation, such as Q8_0 or Q4_K_M"
            ) from error
        except Exception as error:  # any kind, from damaged blocks
            raise CheckpointError(
                self.where,
                [f"tensor {info.name!r} cannot be dequantised: {error}"],
                "the file is damaged; download or copy it again",
            ) from error

    def _rope_factors(self) -> dict[str, np.ndarray]:
        """Return the tables of the rotary embedding that the file has, by their names' ends."""
        return {
            info.name: self._dequantised(info, self.file.rows(info)).reshape(-1).astype(np.float64)
            for info in self.file.tensors.values()
            if info.name.endswith(_ROPE_TABLES)
        }


def _part_of(info: TensorInfo, name: str) -> TensorInfo:
    """Return the tensor of a Hugging Face name: one expert's of a stack, or with an axis of one."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if expert is not None and len(info.shape) == 3:
        num_bytes = info.row_bytes * info.shape[1]
        offset = info.offset + int(expert[1]) * num_bytes
        return replace(info, shape=info.shape[1:], offset=offset)
    if name.endswith(".shared_expert_gate.weight"):
        return replace(info, shape=(1, *info.shape))
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        return replace(info, shape=(info.shape[0], 1, info.shape[1]))
    return info
