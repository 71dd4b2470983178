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

from benchmarks.common import workloads
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import policy_options
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns
from benchmarks.common.serving import Runtimes, answered
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
        plain = open_runtimes.open()
        adapted = open_runtimes.open(
            max_adapters=max(counts),
            max_adapter_rank=options.rank,
            adapter_dtype=options.adapter_dtype,
        )
        prompts = [item.prompt_token_ids for item in workloads.items(options, plain)]
        load_s = [_loaded(adapted, number, options) for number in range(max(counts))]

        def play(way: str) -> Figures:
            count = 0 if way == _WITHOUT else int(way)
            params = [
                SamplingParams(
                    max_tokens=options.output_tokens,
                    forced_length=options.output_tokens,
                    ignore_eos=True,
                    adapter=str(index % count) if count else None,
                )
                for index in range(len(prompts))
            ]
            return answered(plain if way == _WITHOUT else adapted, prompts, params)[0]

        found = take_turns((_WITHOUT, *map(str, counts)), options.repeats, play)
    return {
        "load_s": statistics.median(load_s),
        "without": summary(found[_WITHOUT]),
        "cases": [
            {
                "num_adapters": count,
                "share_of_throughput": ratio(found, "tokens_per_s", str(count), _WITHOUT),
                **summary(found[str(count)]),
            }
            for count in counts
        ],
    }


def _loaded(rt: Runtime, number: int, options: argparse.Namespace) -> float:
    rng = np.random.default_rng((options.seed, number))
    shapes = rt.adapter_shapes(options.rank)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    begin_s = time.perf_counter()
    rt.load_adapter(str(number), arrays, scale=_SCALE / options.rank)
    return time.perf_counter() - begin_s


OPTIONS = (
    *workloads.options(),
    repeats("way"),
    *policy_options("auto"),
    option("--adapters", "0,1,8,64", "numbers of adapters in use, separated by commas"),
    option("--rank", 16, "of each adapter"),
    option("--adapter-dtype", None, "bfloat16, if not the dtype of the weights"),
)
main = Benchmark(__doc__, run, OPTIONS, "adapters")


if __name__ == "__main__":
    sys.exit(main())
