"""Tokens a second with adapters and without: `python -m benchmarks.adapters --help`.

The same prompts get answers of the same lengths from a runtime without adapters and from one that
has some, in turns: no request has one, all have the same one, or 8 and 64 adapters are in a batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from benchmarks.common import workloads
from benchmarks.common.harness import arguments_of, command, show
from benchmarks.common.policies import add_policy_options, parse_policies
from benchmarks.common.repeats import Figures, Spread, add_repeats, in_turns, ratios, summary
from benchmarks.common.serving import Runtimes
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


# The way of a runtime that has no memory for adapters.
_WITHOUT = "without"
_SCALE = 0.01


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    options = build_parser().parse_args(arguments)
    return command(run, options, show_result=_print_table, is_whole=_is_whole)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures without adapters, and with each number of them."""
    from benchmarks.common import environment

    counts = [int(count) for count in options.adapters.split(",")]
    if min(counts) < 0 or max(counts) < 1:
        raise InvalidConfigError(
            f"--adapters {options.adapters}: pass numbers of at least 0, one of them above 0"
        )
    with Runtimes(options) as open_runtimes:
        policy = parse_policies(options.policies)[0]
        plain = open_runtimes.open(policy)
        adapted = open_runtimes.open(
            policy,
            max_adapters=max(counts),
            max_adapter_rank=options.rank,
            adapter_dtype=options.adapter_dtype,
        )
        prompts = [item.prompt_token_ids for item in workloads.items(options, plain)]
        load_s = [_loaded(adapted, number, options) for number in range(max(counts))]
        found: dict[str, list[Figures]] = {_WITHOUT: [], **{str(count): [] for count in counts}}
        for repeat, way in in_turns(tuple(found), options.repeats):
            print(f"run {repeat + 1}, adapters: {way}", file=sys.stderr)
            count = 0 if way == _WITHOUT else int(way)
            rt = plain if way == _WITHOUT else adapted
            found[way].append(_played(rt, prompts, count, options.output_tokens))
    rates = {way: [each["tokens_per_s"] for each in runs] for way, runs in found.items()}
    return {
        "benchmark": "adapters",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "load_s": statistics.median(load_s),
        "without": summary(found[_WITHOUT]),
        "cases": [
            {
                "num_adapters": count,
                "share_of_throughput": _spread(rates[str(count)], rates[_WITHOUT]),
                **summary(found[str(count)]),
            }
            for count in counts
        ],
        **environment.describe(),
    }


def _loaded(rt: Runtime, number: int, options: argparse.Namespace) -> float:
    """Load a random adapter of all matrices, and return the seconds that it took."""
    rng = np.random.default_rng((options.seed, number))
    shapes = rt.adapter_shapes(options.rank)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    begin_s = time.perf_counter()
    rt.load_adapter(str(number), arrays, scale=_SCALE / options.rank)
    return time.perf_counter() - begin_s


def _played(rt: Runtime, prompts: list[Any], count: int, output_tokens: int) -> Figures:
    """Return the figures of one run, with nothing in the prefix cache."""
    rt.forget_kept_pages()
    params = [
        SamplingParams(
            max_tokens=output_tokens,
            forced_length=output_tokens,
            ignore_eos=True,
            adapter=str(index % count) if count else None,
        )
        for index in range(len(prompts))
    ]
    begin_s = time.perf_counter()
    done = rt.generate(prompts, params, progress=False)
    wall_s = time.perf_counter() - begin_s
    num_tokens = sum(len(each.token_ids) for each in done)
    return {
        "wall_s": wall_s,
        "num_failed": sum(each.error is not None for each in done),
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / wall_s,
    }


def _spread(rates: list[float], others: list[float]) -> dict[str, Any]:
    spread = Spread.of(ratios(rates, others))
    return {"median": spread.median, "range": [spread.low, spread.high]}


def _is_whole(result: dict[str, Any]) -> bool:
    return not any(case["num_failed"] for case in (result["without"], *result["cases"]))


def _print_table(result: dict[str, Any]) -> None:
    table = Table("adapters", "tokens/s", "share", box=None, header_style="bold")
    table.add_row("without", f"{result['without']['tokens_per_s']:.0f}", "")
    for case in result["cases"]:
        share = case["share_of_throughput"]
        low, high = share["range"]
        table.add_row(
            str(case["num_adapters"]),
            f"{case['tokens_per_s']:.0f}",
            f"{share['median']:.2f} ({low:.2f} to {high:.2f})",
        )
    show(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters",
        description="The same prompts without adapters and with several, in turns. Prints a table "
        "and one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    workloads.add_arguments(parser)
    add_repeats(parser, "way")
    add_policy_options(parser, policies="auto", max_context=1024)
    parser.add_argument(
        "--adapters", default="0,1,8,64", help="numbers of adapters in use, separated by commas"
    )
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument(
        "--adapter-dtype", default=None, help="bfloat16, if not the dtype of the weights"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
