"""A tiny GGUF model on which benchmarks run from end to end."""

from __future__ import annotations

from pathlib import Path

from tests.models.gguf_models import TOKENIZER, write_gguf


def arguments(folder: Path) -> list[str]:
    """Write the model, and return options for a small workload on it."""
    path = folder / "tiny.gguf"
    if not path.exists():
        write_gguf(path, "llama", tokenizer=TOKENIZER)
    return [
        *("--model", str(path), "--workload", "uniform", "--num-requests", "4"),
        *("--prompt-tokens", "4", "--output-tokens", "6"),
        *("--max-slots", "2", "--max-context", "64", "--kv-memory", "2MB"),
    ]
