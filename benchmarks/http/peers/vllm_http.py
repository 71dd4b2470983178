"""vLLM's server, its CPU build: `python SCRIPT JOB.json PORT`. Runs in its own environment."""

from __future__ import annotations

import json
import os
import sys

# In benchmarks/offline/peers, which is on the path.
from vllm_offline import set_environment


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    set_environment(job)
    options = {
        "--model": job["models"]["safetensors"],
        "--served-model-name": "model",
        "--dtype": "float32",
        "--max-num-seqs": job["batch_size"],
        "--max-model-len": job["max_context"],
        "--host": "127.0.0.1",
        "--port": sys.argv[2],
    }
    words = [str(word) for pair in options.items() for word in pair]
    words += ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    del os.environ["PYTHONPATH"]
    # Not the command `vllm`, which looks for a distribution of another name than this build's.
    server = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    os.execv(sys.executable, [sys.executable, *server, *words])


if __name__ == "__main__":
    main()
