"""Tokens a second with adapters and without: `python -m benchmarks.adapters --help`.

The same prompts get answers of the same lengths from a runtime without adapters and from one with
adapters, in turns: no request has an adapter, all have the same one, or 8 and 64 adapters are in a
batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import environment, workloads
from benchmarks.common.harness import Benchmark, arguments_of, print_table
from benchmarks.common.policies import add_policy_options, parse_policies
from benchmarks.common.repeats import Figures, add_repeats, in_turns, ratio, summary
from benchmarks.common.serving import Runtimes
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


# The name of the runtime without memory for adapters.
_WITHOUT = "without"
_SCALE = 0.01


def run(options: argparse.Namespace) -> dict[str, Any]:
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
                "share_of_throughput": ratio(rates[str(count)], rates[_WITHOUT]),
                **summary(found[str(count)]),
            }
            for count in counts
        ],
        **environment.describe(),
    }


def _loaded(rt: Runtime, number: int, options: argparse.Namespace) -> float:
    rng = np.random.default_rng((options.seed, number))
    shapes = rt.adapter_shapes(options.rank)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    begin_s = time.perf_counter()
    rt.load_adapter(str(number), arrays, scale=_SCALE / options.rank)
    return time.perf_counter() - begin_s


def _played(rt: Runtime, prompts: list[Any], count: int, output_tokens: int) -> Figures:
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


def _is_whole(result: dict[str, Any]) -> bool:
    return not any(case["num_failed"] for case in (result["without"], *result["cases"]))


def _print_table(result: dict[str, Any]) -> None:
    share = "{share_of_throughput[median]:.2f} ({share_of_throughput[range][0]:.2f} to "
    share += "{share_of_throughput[range][1]:.2f})"
    print_table(
        [{"num_adapters": "without", **result["without"]}, *result["cases"]],
        ("adapters", "{num_adapters}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("share", lambda case: share.format_map(case) if "share_of_throughput" in case else ""),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
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


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table, is_whole=_is_whole)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
