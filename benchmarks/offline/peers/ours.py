"""jaxserve as a peer: the same job file, the same output."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.offline.peers.answering import timed


def main() -> None:
    begin_s = time.perf_counter()
    from jaxserve import Runtime, SamplingParams

    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
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

        startup_s = time.perf_counter() - begin_s
        result = timed(answers, job)
    print(json.dumps({"startup_s": startup_s, **result}))


if __name__ == "__main__":
    main()
