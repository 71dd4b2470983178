"""Models of well-known shapes, whose weights are random."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Of config.json, for Llama's architecture.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
SHAPES = {
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
}


def hf_config(shape: str, num_layers: int | None = None) -> dict[str, Any]:
    """Return the config.json of a shape, with `num_layers` layers if given."""
    config = dict(zip(SIZES, SHAPES[shape], strict=True))
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    return {**config, "model_type": "llama", "max_position_embeddings": 8192}


@contextmanager
def shape_folder(shape: str) -> Iterator[str]:
    """Yield a folder with the config.json of a shape, for `load="random"`; it is removed."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(shape)), encoding="utf-8")
        yield folder
