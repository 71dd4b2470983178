"""Embeddings against PyTorch, on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.embeddings import main

pytestmark = pytest.mark.release


def test_both_embed_the_same_texts(capsys):
    """The result has both rates, and their embeddings agree."""
    sizes = ["--hidden", "128", "--layers", "2", "--vocab", "300", "--num-texts", "6"]
    sizes += ["--longest", "40", "--max-slots", "4", "--max-step-tokens", "32", "--batch", "4"]
    assert main([*sizes, "--kv-memory", "4MB", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["largest_difference"] < 1e-4
    share = result["jaxserve"]["texts_per_s"] / result["transformers"]["texts_per_s"]
    assert result["times_transformers"]["median"] == share


def test_lengths_in_the_wrong_order(capsys):
    """They are refused before anything is written."""
    assert main(["--shortest", "9", "--longest", "8"]) == 2
    assert "--shortest 9" in capsys.readouterr().err
