"""A disk cache of converted models: parameters as files that are mapped into memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from jaxserve.core.assets import cache_errors, cache_folder, remove_abandoned
from jaxserve.core.errors import ModelCacheError
from jaxserve.models import huge_pages
from jaxserve.models.tokenizer import Tokenizer

# Raise it when the parameters' names, shapes or meaning change.
FORMAT_VERSION = 5
_log = logging.getLogger(__name__)
# Entries that threads of this process are writing, by folder.
_saving: dict[Path, threading.Thread] = {}


@final
@dataclass(frozen=True, kw_only=True)
class Header:
    """The contents of an entry except the parameters."""

    config: Mapping[str, Any]
    tokenizer: Tokenizer


@final
class ConvertedModel:
    """The entry of one source file in one variant (dtype and layout).

    Each entry is a folder, written under a temporary name and renamed. An entry is valid for the
    file that it was made from (path, size, modification time) and while all its files have their
    sizes. A damaged entry is a miss, with a warning, and the next `save` overwrites it. `save`
    removes the entries of files that no longer exist.

    Make it before the file is read: a file that changes afterwards is another one.
    """

    def __init__(self, name: str, source: Path, variant: str):
        source = source.resolve()
        about = source.stat()
        self._made_from = [FORMAT_VERSION, str(source), about.st_size, about.st_mtime_ns]
        key = hashlib.sha256(str(source).encode()).hexdigest()[:12]
        self.folder = cache_folder() / "converted" / f"{name}-{variant}-{key}"
        # The folder of a new entry, and the parameters that are written there.
        self._aside: Path | None = None
        self._written: set[str] = set()

    def read_header(self) -> Header | None:
        """Return configuration and tokenizer; None without a valid entry.

        It waits for a thread of this process that writes the entry.
        """
        saving = _saving.get(self.folder)
        if saving is not None:
            saving.join()
        if not self.folder.is_dir():
            return None
        try:
            entry = json.loads((self.folder / "entry.json").read_text(encoding="utf-8"))
            if entry["made_from"] != self._made_from:
                return None
            if entry["files"] != _sizes(self.folder):
                raise ValueError("files are missing or cut off")
            return Header(config=entry["config"], tokenizer=Tokenizer.load(self.folder))
        except Exception as error:  # any kind, from a damaged file
            self._warn_damaged(error)
            return None

    def restore(
        self, abstract: nnx.State, shardings: nnx.State | None, *, uses_huge_pages: bool
    ) -> nnx.State | None:
        """Read the parameters onto their devices; None if they cannot be read.

        On one CPU whose system has huge pages, large arrays may be read into memory (`huge_pages`);
        other arrays are mapped, and read when they are first used.
        """
        flat = dict(nnx.to_flat_state(abstract))
        places = None if shardings is None else dict(nnx.to_flat_state(shardings))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        try:
            arrays = {
                path: self._mapped(path, variable.get_value()) for path, variable in flat.items()
            }
            is_on_cpu = places is None and next(iter(here.device_set)).platform == "cpu"
            if uses_huge_pages and is_on_cpu:
                arrays = dict(zip(arrays, huge_pages.read(list(arrays.values())), strict=True))
        except Exception as error:  # NumPy raises many kinds for a damaged file
            self._warn_damaged(error)
            return None
        placed = jax.device_put(
            list(arrays.values()),
            [here if places is None else places[path].get_value() for path in arrays],
        )
        return nnx.from_flat_state(
            [
                (path, variable.replace(array))
                for (path, variable), array in zip(flat.items(), placed, strict=True)
            ]
        )

    def _mapped(self, path: tuple[Any, ...], wanted: Any) -> np.memmap:
        """Return a parameter's file as an array; its data begin at a multiple of 64 bytes."""
        file = self.folder / "params" / f"{_key(path)}.npy"
        found = np.load(file, mmap_mode="r").view(wanted.dtype)
        if found.shape != wanted.shape:
            raise ValueError(f"{file.name} has shape {found.shape}, not {wanted.shape}")
        return found

    def hold(self, path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        """Write a parameter of a new entry, which `save` completes, and return it, mapped.

        It takes no memory until it is read. One that cannot be written is returned itself.
        """
        try:
            file = self._write_param(_key(path), array)
        except OSError:  # `save` tries again, and says why
            return array
        mapped = np.load(file, mmap_mode="r").view(array.dtype)
        return jax.device_put(mapped, array.sharding)

    def save(self, config: Mapping[str, Any], tokenizer: Tokenizer, params: nnx.State) -> None:
        """Write the entry; a failure causes a warning only, because the model itself is loaded."""
        try:
            with cache_errors("keeping the converted weights"):
                self._write(config, tokenizer, params)
        except ModelCacheError as error:
            _log.warning(
                "%s. The model is served all the same; the next start converts again", error
            )

    def save_behind(
        self, config: Mapping[str, Any], tokenizer: Tokenizer, params: nnx.State
    ) -> None:
        """Write the entry on another thread, for which the process waits at its end; see `save`.

        Parameters that are deleted meanwhile also cause a warning.
        """

        def run() -> None:
            try:
                self.save(config, tokenizer, params)
            except Exception as error:  # XLA has no type for a deleted array
                _log.warning("the converted weights were not kept: %s", error)
            finally:
                _saving.pop(self.folder, None)

        # Not a daemon: a half-written entry would be converted again.
        thread = threading.Thread(target=run, name="jaxserve-save")
        _saving[self.folder] = thread
        thread.start()

    def _write(self, config: Mapping[str, Any], tokenizer: Tokenizer, params: nnx.State) -> None:
        arrays = {_key(path): v.get_value() for path, v in nnx.to_flat_state(params)}
        try:
            for name, array in arrays.items():
                if name not in self._written:
                    self._write_param(name, array)
            aside = self._new_folder()
            tokenizer.save(aside)
            entry = {"made_from": self._made_from, "config": dict(config), "files": _sizes(aside)}
            (aside / "entry.json").write_text(json.dumps(entry), encoding="utf-8")
            # A complete entry is recognised by its sizes alone, so its bytes must be on the disk
            # before its name.
            _flush(aside)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            os.replace(aside, self.folder)
            _sync(self.folder.parent)
        finally:
            if self._aside is not None:
                shutil.rmtree(self._aside, ignore_errors=True)
            self._aside, self._written = None, set()

    def _write_param(self, name: str, array: jax.Array) -> Path:
        file = self._new_folder() / "params" / f"{name}.npy"
        _require_space(file.parent, array.nbytes)
        # NumPy's files have no name for bfloat16; its bits are stored as integers.
        np.save(file, np.asarray(array).view(f"u{array.dtype.itemsize}"))
        self._written.add(name)
        return file

    def _new_folder(self) -> Path:
        """Return the folder of a new entry, which is removed with this object without `save`."""
        if self._aside is None:
            parent = self.folder.parent
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent, ".save-")
            _remove_orphans(parent)
            self._aside = Path(tempfile.mkdtemp(prefix=".save-", dir=parent))
            weakref.finalize(self, shutil.rmtree, self._aside, ignore_errors=True)
            (self._aside / "params").mkdir()
        return self._aside

    def _warn_damaged(self, error: Exception) -> None:
        _log.warning(
            "the converted model %s is damaged (%s: %s); converting again",
            self.folder,
            type(error).__name__,
            str(error).partition("\n")[0],
        )


def _remove_orphans(parent: Path) -> None:
    """Remove entries whose source is gone; a process that has mapped one keeps it."""
    for folder in parent.iterdir():
        try:
            entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
            is_orphan = not Path(entry["made_from"][1]).exists()
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # none, or a damaged one
        if is_orphan:
            _log.info("%s is removed: %s is not there any more", folder, entry["made_from"][1])
            shutil.rmtree(folder, ignore_errors=True)


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "entry.json")
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


def _flush(folder: Path) -> None:
    """Write the files of a folder, and their names, to the disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(28, f"No space left on device: {num_bytes} bytes needed, {free} free")
