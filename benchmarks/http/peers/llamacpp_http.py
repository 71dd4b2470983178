"""llama.cpp's server, from a wheel of xllamacpp: `python SCRIPT JOB.json PORT`.

Runs in its own environment until it is ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys

# In benchmarks/offline/peers, which is on the path.
from llamacpp_server import slot_context


def main() -> None:
    from xllamacpp import CommonParams, Server, ggml_type

    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    params = CommonParams()
    params.model.path = job["models"]["F32"]
    params.port = int(sys.argv[2])
    params.n_parallel = job["batch_size"]
    params.n_ctx = job["batch_size"] * slot_context(job)
    params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = len(os.sched_getaffinity(0))
    params.n_threads_http = len(job["requests"]) + 2
    params.cache_prompt, params.cache_ram_mib = False, 0
    server = Server(params)
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
