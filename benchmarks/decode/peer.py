"""transformers' continuous batching in PyTorch: `python -m benchmarks.decode.peer --help`.

A model with random weights of the shape of `benchmarks.decode` answers the same number of requests
of the same lengths.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, Record, option, whole_numbers
from benchmarks.common.shapes import SHAPES, hf_config
from benchmarks.offline.peers.transformers_continuous import answer

PACKAGES = ("torch", "transformers", "accelerate", "triton", "flash-attn")


def run(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import GenerationConfig

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = whole_numbers(options.batches, "--batches")
    record = Record.of(
        "decode_peer",
        options,
        model=options.model,
        precision=options.dtype,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        batches=[],
        **environment.describe_torch(device, *PACKAGES),
    )
    model = _model(options, device)
    record.result["attention"] = model.config._attn_implementation
    # Answers continue after an end token, as in benchmarks.decode.
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=greedy, **_batching(options, max(sizes))
    ) as manager:
        for size in sizes:
            measured = partial(_measure, manager, size, options, model.config.vocab_size)
            record.add("batches", f"batch {size}", measured)
    # The manager may have changed it.
    record.result["attention"] = model.config._attn_implementation
    return record.result


def _model(options: argparse.Namespace, device: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    given = hf_config(options.model, options.layers)
    given.pop("model_type")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**given), dtype=getattr(torch, options.dtype)
        )
    return model.eval()


def _batching(options: argparse.Namespace, max_requests: int) -> dict[str, Any]:
    """Return the options that `generate_batch` sets for these requests; the rest are defaults."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return {
        "continuous_batching_config": ContinuousBatchingConfig(allow_block_sharing=False),
        "workload_hints": WorkloadHints(
            max_prompt_length=options.prompt_tokens,
            max_generated_length=options.output_tokens,
            num_requests=max_requests,
        ),
    }


def _measure(
    manager: Any, size: int, options: argparse.Namespace, vocab_size: int
) -> dict[str, Any]:
    prompts = iter(
        np.random.default_rng(size).integers(0, vocab_size, (4, size, options.prompt_tokens))
    )

    def seconds(output_tokens: int) -> float:
        requests = [
            {"prompt": prompt, "num_output_tokens": output_tokens}
            for prompt in next(prompts).tolist()
        ]
        begin_s = time.perf_counter()
        try:
            answers = answer(manager, requests)
        except SystemExit as error:  # how `answer` reports a failure
            raise RuntimeError(str(error)) from error
        wall_s = time.perf_counter() - begin_s
        if any(len(each) != output_tokens for each in answers):
            raise RuntimeError(f"answers of {sorted({len(each) for each in answers})} tokens")
        return wall_s

    # Compiles and captures.
    seconds(min(4, options.output_tokens))
    prefill_s, wall_s = seconds(1), seconds(options.output_tokens)
    decode_s = (wall_s - prefill_s) / max(1, options.output_tokens - 1)
    return {
        "batch_size": size,
        "wall_s": wall_s,
        "output_tokens_per_s": size * options.output_tokens / wall_s,
        "prefill_tokens_per_s": size * options.prompt_tokens / prefill_s,
        "decode_step_s": decode_s,
        "decode_tokens_per_s": size / decode_s,
    }


OPTIONS = (
    option("--model", "llama-3-8b", "the shape of the model", choices=tuple(SHAPES)),
    option("--layers", None, "instead of those of the shape", int),
    option("--dtype", "bfloat16", "of weights and cache"),
    option("--device", None, "PyTorch's name; its GPU where it finds one"),
    option("--batches", "1,8,32,128,256", "requests at once"),
    option("--prompt-tokens", 512, "of each prompt"),
    option("--output-tokens", 128, "of each answer"),
)
main = Benchmark(__doc__, run, OPTIONS, "decode_peer", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
