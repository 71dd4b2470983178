"""transformers with PyTorch: continuous batching. Runs in its own environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_SIZE = 256  # its default
MAX_BATCH_TOKENS = 512  # of one step; its default is made for GPUs and for longer prompts


@contextmanager
def opened(job: dict) -> Iterator:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    folder = job["models"]["safetensors"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pages_a_request = -(-job["max_context"] // PAGE_SIZE)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=job["batch_size"] * pages_a_request + 1,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=job["batch_size"],
        allow_block_sharing=False,
    )
    # Past the model's end token, like ours: it may appear, and the answer continues.
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config
    ) as manager:
        yield lambda requests: answer(manager, requests)


def answer(manager, requests: list[dict]) -> list[list[int]]:
    """Return new tokens of each request, all submitted at once.

    It repeats `generate_batch`, which has one length for all.
    """
    indices = {
        manager.add_request(request["prompt"], max_new_tokens=request["num_output_tokens"]): index
        for index, request in enumerate(requests)
    }
    answers: list[list[int]] = [[]] * len(requests)
    for _ in requests:
        result = None
        while result is None or not result.is_finished():
            if not manager.is_running():
                sys.exit("transformers' generation thread ended")
            result = manager.get_result(timeout=1)
        if result.error:
            sys.exit(f"a request failed: {result.error}")
        answers[indices[result.request_id]] = list(result.generated_tokens)
    return answers


if __name__ == "__main__":
    from answering import main  # next to a script, but not to `benchmarks.decode.peer`

    main(opened, warms_up=True)
