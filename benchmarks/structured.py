"""What grammars cost a token: `python -m benchmarks.structured --help`.

The same prompts are answered with JSON schemas, and without, in turns. Both kinds of answers have
the same number of tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import workloads
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import policy_options
from benchmarks.common.repeats import Figures, ratios, repeats, summary, take_turns
from benchmarks.common.serving import Runtimes, answered
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


_TEXT = {"type": "string", "maxLength": 60}
_LONG = {"type": "string", "maxLength": 200}
_AGE = {"type": "integer", "minimum": 0, "maximum": 130}
_STEPS = {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 5}
_LABEL = {"enum": ["positive", "negative", "neutral"]}
# Objects that are typical of applications; request i has schema i modulo their number.
SCHEMAS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    for properties in (
        {"title": _TEXT, "summary": _LONG, "rating": {"enum": [1, 2, 3]}},
        {"name": _TEXT, "age": _AGE, "email": _TEXT},
        {"steps": _STEPS, "is_done": {"type": "boolean"}},
        {"label": _LABEL, "reason": _LONG},
    )
)


def run(options: argparse.Namespace) -> dict[str, Any]:
    with Runtimes(options) as open_runtimes:
        rt = open_runtimes.open()
        items = workloads.items(options, rt)
        begin_s = time.perf_counter()
        _played(rt, items, _constrained(options, len(items)))
        first_s = time.perf_counter() - begin_s  # grammars are compiled, the vocabulary is read
        lengths: list[int] = []

        def play(way: str) -> Figures:
            params = [_free(options, max(1, each)) for each in lengths]
            if way == "with":
                params = _constrained(options, len(items))
            figures, lengths[:] = _played(rt, items, params)
            return figures

        found = take_turns(("with", "without"), options.repeats, play)
    share = ratios(*([run["tokens_per_s"] for run in runs] for runs in found.values()))
    return {
        "first_run_s": first_s,
        **{name: summary(runs) for name, runs in found.items()},
        "costs": summary([{"throughput_share": each} for each in share]),
    }


def _constrained(options: argparse.Namespace, count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            json_schema=SCHEMAS[i % len(SCHEMAS)],
            max_tokens=options.output_tokens,
            temperature=options.temperature,
            seed=options.seed + i,
        )
        for i in range(count)
    ]


def _free(options: argparse.Namespace, num_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, temperature=options.temperature, seed=options.seed
    )


def _played(
    rt: Runtime, items: list[WorkloadItem], params: list[SamplingParams]
) -> tuple[Figures, list[int]]:
    figures, engine, answers = answered(rt, [list(item.prompt_token_ids) for item in items], params)
    num_tokens = max(1, figures["output_tokens"])
    figures |= {
        "num_ended": sum(answer.finish_reason == "stop" for answer in answers),
        "token_s": figures["wall_s"] / num_tokens,
        "mask_token_s": engine["mask_s"] / num_tokens,
        "forced_share": engine["num_forced"] / num_tokens,
        "host_gap_share": engine["host_gap_s"] / engine["busy_s"] if engine["busy_s"] else 0.0,
    }
    return figures, [len(answer.token_ids) for answer in answers]


OPTIONS = (
    *workloads.options(),
    option("--temperature", 1.0, "of both ways; 0 is greedy"),
    repeats("way"),
    *policy_options("auto"),
)
main = Benchmark(__doc__, run, OPTIONS, "structured")


if __name__ == "__main__":
    sys.exit(main())
