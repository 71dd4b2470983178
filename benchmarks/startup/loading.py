"""Peak host memory of loading a checkpoint: `python -m benchmarks.startup.loading --help`.

Writes a random checkpoint in shards into a temporary folder, and loads it in new processes. Run it
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from safetensors.numpy import save_file

from benchmarks.common.environment import status_bytes
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.processes import result_of
from benchmarks.common.repeats import repeats, summary
from benchmarks.common.shapes import SIZES
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import format_bytes
from jaxserve.execution.memory_plan import available_host_bytes

# Llama's architecture: Llama 2 7B, and a small one of many layers for tests.
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(SIZES, sizes, strict=True))
    for name, sizes in {
        "7b": (4096, 11008, 32, 32, 32, 32000),
        "small": (512, 1408, 24, 8, 8, 4096),
    }.items()
}
DTYPES = ("bfloat16", "float16", "float32")
# Memory over the size of the checkpoint that a run needs.
_ROOM = 1.25
_SAMPLE_S = 0.01
_PROGRAM = "from benchmarks.startup.loading import load; load()"


def run(options: argparse.Namespace) -> dict[str, Any]:
    figures = measure(options.shape, options.dtype, options.folder, repeats=options.repeats)
    return {"shape": options.shape, "dtype": options.dtype, **figures}


def measure(
    shape: str, dtype: str, parent: Path | None = None, *, repeats: int = 1
) -> dict[str, Any]:
    """Load a random checkpoint `repeats` times, each time in a new process and from the disk.

    Args:
      parent: the folder to write under; the checkpoint is removed again.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-loading-", dir=parent) as folder:
        _check_room(SHAPES[shape], dtype, Path(folder))
        begin_s = time.perf_counter()
        num_shards = _write(SHAPES[shape], dtype, Path(folder))
        write_s = time.perf_counter() - begin_s
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        runs = []
        for _ in range(repeats):
            for path in Path(folder).glob("*.safetensors"):
                _leave_page_cache(path)
            figures = result_of("-c", _PROGRAM, folder, dtype)
            runs.append({**figures, "ratio": figures["peak_host_bytes"] / num_bytes})
    return {
        "checkpoint_bytes": num_bytes,
        "num_shards": num_shards,
        **summary(runs),
        "write_s": write_s,
    }


# ---- the checkpoint ----


def _tensors(sizes: dict[str, int]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors of each shard: embedding, layers, head."""
    hidden, inner, vocab = (
        sizes[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    yield {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (heads, hidden),
            f"{at}.self_attn.v_proj.weight": (heads, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    yield {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _write(sizes: dict[str, int], dtype: str, folder: Path) -> int:
    """Write the checkpoint, and return its number of shards.

    Every byte is random, so that neither the file system nor the memory can share equal pages.
    """
    rng = np.random.default_rng(0)
    shards = list(_tensors(sizes))
    weight_map = {}
    for number, shapes in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({key: _random(rng, shape, dtype) for key, shape in shapes.items()}, folder / name)
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {"model_type": "llama", "max_position_embeddings": 4096, **sizes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(shards)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return random bits with the highest exponent bit cleared: finite numbers below 2."""
    bits = np.dtype(dtype).itemsize * 8
    words = rng.integers(0, 2**bits, shape, dtype=f"uint{bits}")
    words &= words.dtype.type(~(1 << (bits - 2)) & (2**bits - 1))
    return words.view(dtype)


def _leave_page_cache(path: Path) -> None:
    """Write a file to the disk, and evict it from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check_room(sizes: dict[str, int], dtype: str, folder: Path) -> None:
    count = sum(int(np.prod(shape)) for shard in _tensors(sizes) for shape in shard.values())
    num_bytes = count * np.dtype(dtype).itemsize
    for what, there, needed in (
        (f"disk space in {folder.parent}", shutil.disk_usage(folder).free, int(num_bytes * 1.02)),
        ("memory", available_host_bytes(), int(num_bytes * _ROOM)),
    ):
        if there < needed:
            raise InvalidConfigError(
                f"{format_bytes(there)} of {what} are free, {format_bytes(needed)} are needed; "
                "give another --folder or a smaller --shape"
            )


# ---- the process that loads ----


def load() -> None:
    """Load a checkpoint; print the memory of this process before, and at its peak, as JSON."""
    import jax

    from jaxserve.models.store import load_model

    folder, dtype = sys.argv[1:]
    jax.devices()
    before_bytes = status_bytes("VmRSS")
    with _PeakOf("RssAnon") as anonymous:
        begin_s = time.perf_counter()
        loaded = load_model(folder, dtype=dtype, progress=False)
        jax.block_until_ready(loaded.params)
        load_s = time.perf_counter() - begin_s
    figures = {
        "weights_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params)),
        "before_bytes": before_bytes,
        "peak_host_bytes": status_bytes("VmHWM"),
        "peak_anonymous_bytes": anonymous.peak_bytes,
        "load_s": load_s,
    }
    print(json.dumps(figures))


@final
class _PeakOf:
    """The largest value of a field of this process's status, sampled every `_SAMPLE_S` seconds."""

    def __init__(self, field: str):
        self.peak_bytes = 0
        self._field = field
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakOf:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_SAMPLE_S)
            self.peak_bytes = max(self.peak_bytes, status_bytes(self._field))


OPTIONS = (
    option("--shape", "7b", "of the model", choices=SHAPES),
    option("--dtype", "bfloat16", "of the checkpoint and in memory", choices=DTYPES),
    option("--folder", None, "to write under, if not the system's temporary folder", Path),
    repeats("load"),
)
main = Benchmark(__doc__, run, OPTIONS, "loading")


if __name__ == "__main__":
    sys.exit(main())
