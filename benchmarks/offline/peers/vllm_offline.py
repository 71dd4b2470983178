"""vLLM's CPU build, compiled by default. Runs in its own environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A script finds the module next to it.
from answering import Answers, main

# Its lookup decoding, with the longest match and the number of proposals of its examples.
LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


@contextmanager
def opened(job: dict) -> Iterator[Answers]:
    set_environment(job)
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["models"].get("compressed_tensors") or job["models"]["safetensors"],
        dtype=job["activations"],
        max_num_seqs=job["batch_size"],
        max_model_len=job["max_context"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        speculative_config=LOOKUP if job["speculates"] else None,
    )

    def answers(requests: list[dict]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=request["num_output_tokens"],
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        done = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    yield answers


def set_environment(job: dict) -> None:
    """Use a thread on every core (vLLM reserves one) and OpenMP as its manual advises."""
    cores = sorted(os.sched_getaffinity(0))
    openmp = sorted(Path(sys.prefix, "lib").glob("libiomp5.so"))
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(job["kv_cache_gib"]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, openmp)),
    }


if __name__ == "__main__":
    main(opened, warms_up=True)
