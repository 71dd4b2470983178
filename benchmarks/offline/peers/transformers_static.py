"""transformers with PyTorch: static batches, padded on the left. Runs in its own environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# A script finds the module next to it.
from answering import Answers, main


@contextmanager
def opened(job: dict) -> Iterator[Answers]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job["models"]["safetensors"], dtype=torch.float32
    ).eval()
    # Past the model's end token, like ours: it may appear, and the answer continues.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def answers(requests: list[dict]) -> list[list[int]]:
        token_ids, size = [], job["batch_size"]
        for start in range(0, len(requests), size):
            token_ids += _answer(torch, model, requests[start : start + size])
        return token_ids

    yield answers


def _answer(torch, model, requests: list[dict]) -> list[list[int]]:
    """Run a batch to its longest answer; each request keeps its number of tokens."""
    width = max(len(request["prompt"]) for request in requests)
    padding = [width - len(request["prompt"]) for request in requests]
    ids = [[0] * pad + request["prompt"] for pad, request in zip(padding, requests, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(request["num_output_tokens"] for request in requests),
            do_sample=False,
        )
    answers = output[:, width:].tolist()
    return [
        answer[: request["num_output_tokens"]]
        for answer, request in zip(answers, requests, strict=True)
    ]


if __name__ == "__main__":
    main(opened, warms_up=True)
