"""One start in this process, and the seconds of its parts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import Any

from benchmarks.common.environment import status_bytes

_STAGES = ("tokenizer", "weights", "cache")


def start_once(model: str, settings: dict[str, Any], begin_s: float) -> dict[str, Any]:
    """Start a runtime, answer one prompt twice, and return the seconds of each part.

    Executables' seconds are those of the threads that made them concurrently, and so do not add up
    to the whole.

    Args:
      begin_s: `time.time()` at which the process was started.
    """
    import_s = time.time()
    import jax

    stages: dict[str, float] = defaultdict(float)
    executables: list[dict[str, Any]] = []

    def on_event(event: str, duration_secs: float, **about: Any) -> None:
        if event.startswith("/jaxserve/start/"):
            stages[event.rpartition("/")[2]] += duration_secs
        elif event.startswith("/jaxserve/executable/"):
            how = event.rpartition("/")[2]
            executables.append({"name": about["name"], "how": how, "seconds": duration_secs})

    jax.monitoring.register_event_duration_secs_listener(on_event)
    from jaxserve import Runtime, SamplingParams

    imported_s = time.time()
    one = SamplingParams(max_tokens=1)
    # A model of random weights has no tokenizer.
    prompt = [1, 2, 3] if settings.get("load") == "random" else "What is the capital of France?"
    with Runtime.from_pretrained(model, progress=False, **settings) as rt:
        ready_s = time.time()
        rt.generate(prompt, one, progress=False)
        first_token_s = time.time()
        made = list(executables)
        resident_bytes = status_bytes("VmRSS")
        rt.generate(prompt, one, progress=False)
        second_token_s = time.time()
    return {
        "interpreter_s": import_s - begin_s,
        "imports_s": imported_s - import_s,
        **{f"{stage}_s": stages[stage] for stage in _STAGES},
        "ready_s": ready_s - begin_s,
        "first_token_s": first_token_s - begin_s,
        # What the first answer waits for besides its own steps: executables and first touch.
        "first_answer_s": first_token_s - ready_s,
        "second_answer_s": second_token_s - first_token_s,
        "resident_bytes": resident_bytes,
        "num_loaded": sum(each["how"] == "loaded" for each in made),
        "num_compiled": sum(each["how"] == "compiled" for each in made),
        "executables": made,
    }


def main(arguments: list[str] | None = None) -> int:
    """Start once, print one line of JSON, and return the exit code."""
    begin_s = time.time()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup.once", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("begin_s", type=float, nargs="?", default=begin_s)
    options = parser.parse_args(arguments)
    print(json.dumps(start_once(options.model, options.settings, options.begin_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
