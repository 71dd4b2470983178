"""A part of gpu-check without measurements: `-m tests.scripts.fake_part ok|late|fail|hang`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.common.harness import Record


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("does")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record = Record(options.output, options.budget, benchmark="fake")
    record.add("figures", "one", lambda: {"value": 1})
    if options.does == "late":
        time.sleep(options.budget)
        record.add("figures", "two", lambda: {"value": 2})
    print("chatter")
    if options.does == "hang":
        time.sleep(60)
    if options.does == "fail":
        print("no such kernel", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
