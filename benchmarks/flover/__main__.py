"""Figures 4 to 7 of the Flover paper, measured: `python -m benchmarks.flover --help`.

Section VI with every time scaled to the model at hand: what the paper gives in milliseconds is
taken relative to the 5,800 ms that one request takes there, and lengths relative to its 512 tokens.
Progress on stderr, one JSON object on stdout; docs/benchmarks/papers.md says what each part holds.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.common.output import arguments_of, command
from benchmarks.common.policies import (
    REQUEST_LEVEL_AND_ITERATION_LEVEL,
    add_policy_options,
    parse_policies,
)
from benchmarks.common.repeats import add_repeats
from benchmarks.common.serving import Runtimes
from benchmarks.flover.section import LONGEST, PAPER_INTERVAL_MS, SectionVI
from jaxserve.core.errors import InvalidConfigError


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the whole section."""
    from benchmarks.common import environment

    if options.quick:
        options.max_requests, options.output_tokens, options.repeats = 4, 8, 1
    if options.max_requests < 1 or options.output_tokens < 8:
        raise InvalidConfigError(
            f"max_requests={options.max_requests} and output_tokens={options.output_tokens}; "
            "give at least one request and 8 tokens"
        )
    policies = parse_policies(options.policies)
    options.max_context = options.prompt_tokens + round(max(LONGEST) * options.output_tokens)
    with Runtimes(options) as runtimes:
        section = SectionVI(options, runtimes, policies)
        parts = section.play()
    return {
        "benchmark": "flover",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "alone_s": section.alone_s,
        "interval_s": section.seconds(PAPER_INTERVAL_MS),
        **parts,
        **environment.describe(),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flover",
        description="Section VI of the Flover paper, scaled to the model at hand: total time over "
        "the number of requests at a constant interval, under Poisson arrivals, and with answers "
        "of many lengths with and without the memory shuffle. Prints one JSON object. About "
        "a quarter of an hour a repeat on two CPU cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--max-requests", type=int, default=32, help="1, 2, 4, ... up to this many")
    add("--prompt-tokens", type=int, default=16, help="of each prompt")
    add("--output-tokens", type=int, default=32, help="of each answer; the paper has 512")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add("--quick", action="store_true", help="4 requests of 8 tokens, once")
    add_repeats(parser, "policy")
    add_policy_options(parser, policies=REQUEST_LEVEL_AND_ITERATION_LEVEL, max_context=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
