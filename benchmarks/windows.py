"""Pages grouped by window beside one group, in one pool: `python -m benchmarks.windows --help`.

A model of Gemma 3's layers with random weights answers the same requests, all at once, with as much
memory of pages: with those behind windows freed, and with all kept until a sequence ends, in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns
from benchmarks.common.serving import answered, raise_error
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import random_items

# Options of each runtime. Pages that come from the host layer by layer are in one group; none come
# without host memory.
_PAGES: dict[str, dict[str, Any]] = {"one_group": {"restore": "per_layer"}, "grouped": {}}
# Every sixth layer sees the whole context.
_SHAPE: dict[str, Any] = {
    **dict(model_type="gemma3_text", vocab_size=16_000, max_position_embeddings=16_384),
    **dict(hidden_size=768, intermediate_size=2304, query_pre_attn_scalar=64, head_dim=64),
    **dict(num_attention_heads=8, num_key_value_heads=2),
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    from flax import nnx

    from jaxserve import Runtime
    from jaxserve.execution.compilation import start_jax
    from jaxserve.execution.sizes import platform_defaults
    from jaxserve.models.families import config_from_hf
    from jaxserve.models.store import load_model

    start_jax()
    layers = {"num_hidden_layers": options.layers, "sliding_window": options.window}
    model = load_model(
        config_from_hf(_SHAPE | layers), dtype=platform_defaults().dtype, load="random"
    )
    items = random_items(
        options.num_requests,
        num_prompt_tokens=options.prompt_tokens,
        num_output_tokens=options.output_tokens,
        min_output_tokens=options.min_output_tokens,
        vocab_size=model.config.vocab_size,
        seed=options.seed,
    )
    prompts = [item.prompt_token_ids for item in items]
    # Greedy answers of random weights would repeat a token, and hide what differs.
    params = [replace(item.params(), temperature=1.0, seed=i) for i, item in enumerate(items)]
    answers: list[list[tuple[int, ...]]] = []
    with ExitStack() as stack:
        runtimes = {
            name: stack.enter_context(
                Runtime(
                    nnx.merge(model.graphdef, model.params),
                    model.params,
                    policy=options.policy,
                    kv_memory=options.kv_memory,
                    host_memory=0,
                    max_slots=options.num_requests,
                    max_context=options.prompt_tokens + options.output_tokens,
                    warmup="full",
                    **more,
                )
            )
            for name, more in _PAGES.items()
        }
        if not runtimes["grouped"].config.page_layout.is_grouped:
            raise InvalidConfigError(
                f"--layers {options.layers} has one group of pages on this platform; run on a "
                "CPU, with at least 6 layers"
            )

        def play(name: str) -> Figures:
            begin_s = time.perf_counter()
            figures, counters, done = answered(runtimes[name], prompts, params)
            raise_error(done)
            answers.append([each.token_ids for each in done])
            steps = [s for s in runtimes[name].report().steps if s.submitted_s >= begin_s]
            running = [step.num_running for step in steps]
            ends_s = [*(step.submitted_s for step in steps[1:]), begin_s + figures["wall_s"]]
            lasted_s = np.subtract(ends_s, [step.submitted_s for step in steps])
            return {
                **figures,
                "num_running": {
                    "mean": float(np.average(running, weights=lasted_s)),
                    "max": max(running),
                },
                "num_preemptions": counters["num_preemptions"],
                "num_recomputed": counters["num_recomputed"],
            }

        runs = take_turns(list(_PAGES), options.repeats, play)
    return {
        "same_tokens": all(each == answers[0] for each in answers),
        "pages": {name: summary(own) for name, own in runs.items()},
        "tokens_per_s_of_one_group": ratio(runs, "tokens_per_s", "grouped", "one_group"),
    }


OPTIONS = (
    option("--layers", 6, "layers; each sixth one sees the whole context"),
    option("--window", 512, "positions that the other layers see"),
    option("--kv-memory", "64MiB", "memory of the pages, the same for both"),
    option("--policy", "vllm_like", "a preset; the default admits on demand and computes again"),
    option("--num-requests", 16, "requests of a run; as many can be answered at once"),
    option("--prompt-tokens", 2048, "of each prompt"),
    option("--min-output-tokens", 256, "of the shortest answer"),
    option("--output-tokens", 1024, "of the longest answer"),
    option("--seed", 0, "of prompts and lengths"),
    repeats("way to keep pages"),
)
main = Benchmark(
    __doc__, run, OPTIONS, "windows", is_whole=lambda result: bool(result["same_tokens"])
)


if __name__ == "__main__":
    sys.exit(main())
