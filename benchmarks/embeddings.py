"""Texts embedded a second: `python -m benchmarks.embeddings --help`.

A random model of Qwen3's kind is written to a folder, and embeds the same texts of random lengths
through `rt.embed` and with PyTorch transformers, in turns. Transformers pads batches of texts of
similar lengths.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns
from jaxserve.core.errors import InvalidConfigError, MissingExtraError
from jaxserve.runtime import Runtime

if TYPE_CHECKING:
    import transformers

_WAYS = ("jaxserve", "transformers")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not 1 <= options.shortest <= options.longest:
        raise InvalidConfigError(
            f"--shortest {options.shortest} and --longest {options.longest}: pass lengths of at "
            "least 1 in this order"
        )
    rng = np.random.default_rng(options.seed)
    lengths = rng.integers(options.shortest, options.longest + 1, options.num_texts)
    texts = [rng.integers(0, options.vocab, length).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        peer = _written(folder, options)
        with Runtime.from_pretrained(
            folder,
            dtype="float32",
            max_context=options.longest,
            max_slots=options.max_slots,
            max_step_tokens=options.max_step_tokens,
            kv_memory=options.kv_memory,
            warmup="full",
            progress=False,
        ) as rt:
            vectors: dict[str, np.ndarray] = {}

            def play(way: str) -> Figures:
                rt.forget_kept_pages()
                begin_s = time.perf_counter()
                if way == "jaxserve":
                    vectors[way] = rt.embed(texts)
                else:
                    vectors[way] = _embedded(peer, texts, options.batch)
                passed_s = time.perf_counter() - begin_s
                return {
                    "texts_per_s": len(texts) / passed_s,
                    "tokens_per_s": int(lengths.sum()) / passed_s,
                }

            for way in _WAYS:
                play(way)  # what is made at the first use
            found = take_turns(_WAYS, options.repeats, play)
    own, other = (vectors[way] for way in _WAYS)
    return {
        "num_tokens": int(lengths.sum()),
        "largest_difference": float(abs(own - other).max()),
        "times_transformers": ratio(found, "texts_per_s", *_WAYS),
        **{way: summary(found[way]) for way in _WAYS},
    }


def _written(folder: str, options: argparse.Namespace) -> transformers.PreTrainedModel:
    """Write a model without a head to a folder, and return it."""
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "test", "this comparison") from error
    torch.manual_seed(options.seed)
    config = transformers.Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        max_position_embeddings=32768,
    )
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def _embedded(
    model: transformers.PreTrainedModel, texts: Sequence[list[int]], batch: int
) -> np.ndarray:
    """Return the normalised last states of texts, in batches of the longest first."""
    import torch

    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    found = np.zeros((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        width = len(texts[some[0]])
        tokens = torch.tensor([texts[i] + [0] * (width - len(texts[i])) for i in some])
        ends = torch.tensor([len(texts[i]) - 1 for i in some])
        with torch.inference_mode():
            mask = (torch.arange(width)[None] <= ends[:, None]).long()
            states = model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
            last = states[torch.arange(len(some)), ends]
            found[some] = torch.nn.functional.normalize(last, dim=-1).numpy()
    return found


OPTIONS = (
    option("--hidden", 512, "hidden size, a multiple of 64"),
    option("--layers", 8, "number of layers"),
    option("--vocab", 32000, "tokens of the vocabulary"),
    option("--num-texts", 128, "texts of a run"),
    option("--shortest", 8, "tokens of the shortest text"),
    option("--longest", 256, "tokens of the longest text"),
    option("--batch", 16, "texts of a batch of transformers"),
    option("--max-slots", 32, "as for Runtime"),
    option("--max-step-tokens", 512, "as for Runtime"),
    option("--kv-memory", "256MB", "as for Runtime"),
    option("--seed", 0, "of weights and texts"),
    repeats("way"),
)
main = Benchmark(__doc__, run, OPTIONS, "embeddings")


if __name__ == "__main__":
    sys.exit(main())
