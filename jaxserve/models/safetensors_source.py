"""Weights from a Hugging Face folder of safetensors files, whole or sharded; no PyTorch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import final

import ml_dtypes  # also registers bfloat16 with NumPy, which safetensors then uses
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.core.errors import CheckpointError, UnknownModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Safetensors' names of the eight-bit floats that NumPy has from ml_dtypes.
_FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_REMEDY = "the download is probably incomplete: fetch the files named above again"
_MIXED = (
    f"the files are whole, and {_INDEX} is of another save: take the index and its files from the "
    "same place, without files of an earlier save"
)


@final
class SafetensorsSource:
    """A `WeightSource` over `folder`.

    A file is mapped into memory only during a read. Otherwise the parts that were read would stay
    resident, in the end as a second copy of the weights.

    Raises:
      UnknownModelError: the folder has no safetensors file.
      CheckpointError: files that the index names are missing, cut short, or not safetensors;
        all of them together.
    """

    def __init__(self, folder: str | Path):
        self.where = str(folder)
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        problems = []
        expected = _files_and_tensors(Path(folder))
        index = {name: file for file, names in expected.items() for name in names}
        for file_name, names in expected.items():
            path = Path(folder) / file_name
            # A name such as "../other" would read files that the user did not name. Links are
            # followed, because the cache of the Hugging Face hub keeps its files in another folder.
            if Path(file_name).name != file_name:
                problems.append(f"the index names {file_name!r}, which is not a file of the folder")
                continue
            if not path.is_file():
                problems.append(f"file {file_name} is missing")
                continue
            try:
                with safe_open(path, framework="numpy") as file:
                    about = {name: file.get_slice(name) for name in file.keys()}
                    held = {name: tuple(each.get_shape()) for name, each in about.items()}
                    kinds = {name: each.get_dtype() for name, each in about.items()}
            except (SafetensorError, OSError) as error:
                problems.append(f"file {file_name} is unreadable: {error}")
                continue
            for name in sorted(names - held.keys() if names else ()):
                problems.append(f"tensor {name} is not in {file_name}, where the index puts it")
            # If several files hold a tensor, the index names the one that is read.
            own = {name for name in held if index.get(name, file_name) == file_name}
            self._shapes |= {name: held[name] for name in own}
            self._dtypes |= {name: kinds[name] for name in own}
            self._paths |= dict.fromkeys(own, path)
        if problems:
            are_whole = all("where the index puts it" in problem for problem in problems)
            raise CheckpointError(self.where, problems, _MIXED if are_whole else _REMEDY)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, str]:
        return self._dtypes

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or its part at `index`, in its stored dtype."""
        if name not in self._paths:
            raise CheckpointError(self.where, [f"tensor {name} is missing"], _REMEDY)
        try:
            with safe_open(self._paths[name], framework="numpy") as file:
                found = file.get_slice(name)
                if found.get_dtype() in _FLOAT8:
                    whole = _float8(self._paths[name], name)
                    return whole[index] if index else whole
                return file.get_tensor(name) if not index else found[index]
        except AttributeError as error:  # NumPy has no such type
            raise CheckpointError(
                self.where,
                [f"tensor {name} has the type {self._dtypes[name]}, which is not read"],
                "use a checkpoint in 16 bits, or in one of the formats of docs/quantisation.md",
            ) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                self.where, [f"tensor {name} is unreadable: {error}"], _REMEDY
            ) from error


def _float8(path: Path, name: str) -> np.ndarray:
    """Return a tensor in eight-bit floats, for which safetensors has no NumPy type."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        about = json.loads(file.read(length))[name]
        begin, end = about["data_offsets"]
        file.seek(8 + length + begin)
        octets = np.frombuffer(file.read(end - begin), np.uint8)
    return octets.view(_FLOAT8[about["dtype"]]).reshape(about["shape"])


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _files_and_tensors(folder: Path) -> dict[str, set[str]]:
    """Return, by file name, the tensors that the index lists for it; an empty set without index.

    A single file precedes an index in the same folder, as in transformers.
    """
    if (folder / _SINGLE).is_file():
        return {_SINGLE: set()}
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            if not isinstance(weight_map, dict) or not all(map(_is_text, weight_map.values())):
                raise TypeError("weight_map is not an object of file names by tensor")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                str(folder), [f"file {_INDEX} is unreadable: {error!r}"], _REMEDY
            ) from error
        files: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            files.setdefault(file_name, set()).add(name)
        return files
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise CheckpointError(
            str(folder),
            [f"file {_INDEX} is missing, beside {shards[0]} and {len(shards) - 1} others"],
            "fetch the index, too",
        )
    raise UnknownModelError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX}; give a Hugging Face checkpoint folder "
        "with safetensors weights (convert .bin files with transformers' save_pretrained)"
    )
