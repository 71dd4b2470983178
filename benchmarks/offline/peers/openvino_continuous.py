"""OpenVINO GenAI: continuous batching. Runs in its own environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# A script finds the module next to it.
from answering import Answers, main


@contextmanager
def opened(job: dict) -> Iterator[Answers]:
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = job["batch_size"]
    scheduler.cache_size = job["kv_cache_gib"]
    scheduler.enable_prefix_caching = False
    precision = {"float32": "f32", "bfloat16": "bf16"}[job["activations"]]
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        job["models"].get("few_bits") or job["models"]["F16"],
        scheduler,
        "CPU",
        # Its defaults use lower precision if the processor supports it, with 8 bits for the cache.
        {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision},
    )

    def answers(requests: list[dict]) -> list[list[int]]:
        prompts = [openvino.Tensor([request["prompt"]]) for request in requests]
        configs = [
            openvino_genai.GenerationConfig(
                max_new_tokens=request["num_output_tokens"], ignore_eos=True, do_sample=False
            )
            for request in requests
        ]
        done = pipeline.generate(prompts, configs)
        return [list(result.m_generation_ids[0]) for result in done]

    yield answers


if __name__ == "__main__":
    main(opened, warms_up=True)
