"""Seconds until a runtime is ready, and to its first token: `python -m benchmarks.startup MODEL`.

One start in this process, with the caches as they are; prints one JSON object. `--cold` of
`benchmarks.offline` starts it twice in new processes, with empty caches and with filled ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def main(arguments: list[str] | None = None) -> int:
    """Start once, print the seconds, and return the exit code."""
    options = build_parser().parse_args(arguments)
    begin_s = time.perf_counter()
    from jaxserve import Runtime, SamplingParams

    with Runtime.from_pretrained(options.model, progress=False, **options.settings) as rt:
        ready_s = time.perf_counter() - begin_s
        rt.generate("Hello", SamplingParams(max_tokens=1), progress=False)
        first_token_s = time.perf_counter() - begin_s
    print(json.dumps({"ready_s": ready_s, "first_token_s": first_token_s}))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description="Start a runtime once and print the seconds that it took as JSON.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a name, folder or GGUF file")
    add("settings", nargs="?", type=json.loads, default={}, help="JSON of further settings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
