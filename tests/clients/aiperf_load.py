# /// script
# requires-python = ">=3.11"
# dependencies = ["aiperf==0.13.0"]
# ///
"""AIPerf as a load: streamed chats, and the tokens that the server counts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL, FOLDER = sys.argv[1:]
NUM_REQUESTS, NUM_TOKENS = 6, 8
with tempfile.TemporaryDirectory() as here:
    options = {
        "--model": MODEL,
        "--url": URL,
        "--endpoint-type": "chat",
        "--tokenizer": FOLDER,
        "--concurrency": 2,
        "--request-count": NUM_REQUESTS,
        "--prompt-input-tokens-mean": 16,
        "--prompt-output-tokens-mean": NUM_TOKENS,
        "--extra-inputs": "ignore_eos:true",
        "--ui-type": "none",
        "--output-artifact-dir": here,
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", *words]
    ran = subprocess.run(
        [*command, "--streaming", "--use-server-token-count", "--no-gpu-telemetry"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (path,) = Path(here).rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
assert found["request_count"]["avg"] == NUM_REQUESTS, found
assert not found.get("error_summary"), found["error_summary"]
assert found["output_sequence_length"]["avg"] == NUM_TOKENS, found["output_sequence_length"]
assert found["time_to_first_token"]["avg"] > 0 and found["inter_token_latency"]["avg"] > 0
