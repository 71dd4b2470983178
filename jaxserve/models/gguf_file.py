"""A reader of GGUF headers, which checks every length before it uses it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

import numpy as np
from jaxtyping import UInt8

from jaxserve.core.errors import CheckpointError, MissingExtraError, UnsupportedModelError

MAGIC = b"GGUF"
_REMEDY = "the file is damaged or was cut off; download or copy it again"
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
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
      tensors: name -> `TensorInfo`; all of them lie inside the file.

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
        # The vocabulary is large enough for a loop of its own.
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
