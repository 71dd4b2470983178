"""jaxserve as a peer: the same job file, the same output."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Answer the job's requests, all submitted at once, and print what it took."""
    begin_s = time.perf_counter()
    from jaxserve import Runtime, SamplingParams

    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    requests = job["requests"]
    params = [
        SamplingParams(
            max_tokens=request["max_tokens"],
            forced_length=request["num_output_tokens"],
            ignore_eos=True,
        )
        for request in requests
    ]
    settings = {"warmup": "full", **job["settings"]}
    with Runtime.from_pretrained(job["models"]["safetensors"], **settings) as rt:
        startup_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        done = rt.generate([request["prompt"] for request in requests], params)
        wall_s = time.perf_counter() - begin_s
    token_ids = [list(completion.token_ids) for completion in done]
    print(json.dumps({"startup_s": startup_s, "wall_s": wall_s, "token_ids": token_ids}))


if __name__ == "__main__":
    main()
