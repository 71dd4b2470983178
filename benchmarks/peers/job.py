"""What every peer is given: a Hugging Face folder and requests, as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.gguf_source import GGUFSource
from jaxserve.models.registry import pull
from jaxserve.workload import WorkloadItem


def write_checkpoint(model: str, folder: Path) -> None:
    """A registered GGUF model as float32 safetensors with a config.json."""
    source = GGUFSource(pull(model))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(source.config)), encoding="utf-8")
    tensors = {
        name: np.ascontiguousarray(source.read(name), np.float32) for name in source.shapes()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_job(path: Path, checkpoint: Path, items: Sequence[WorkloadItem], batch: int) -> None:
    """The job file: `model`, `batch_size` and `requests` of prompt ids and answer lengths."""
    job = {
        "model": str(checkpoint),
        "batch_size": batch,
        "requests": [
            {"prompt": list(item.prompt_token_ids), "num_output_tokens": item.num_output_tokens}
            for item in items
        ],
    }
    path.write_text(json.dumps(job), encoding="utf-8")
