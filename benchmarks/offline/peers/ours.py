"""jaxserve as a peer: the same job file, the same output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.offline.peers.answering import Answers, main


@contextmanager
def opened(job: dict) -> Iterator[Answers]:
    from jaxserve import Runtime, SamplingParams

    settings: dict[str, Any] = {"warmup": "full", **job["settings"]}
    kind = "few_bits" if settings.get("quantize") == "keep" else "safetensors"
    with Runtime.from_pretrained(job["models"][kind], **settings) as rt:

        def answers(requests: list[dict]) -> list[list[int]]:
            rt.forget_kept_pages()
            params = [
                SamplingParams(
                    max_tokens=request["max_tokens"],
                    forced_length=request["num_output_tokens"],
                    ignore_eos=True,
                )
                for request in requests
            ]
            done = rt.generate([request["prompt"] for request in requests], params)
            return [list(completion.token_ids) for completion in done]

        yield answers


if __name__ == "__main__":
    main(opened, warms_up=False)
