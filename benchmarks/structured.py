"""What grammars cost a token: `python -m benchmarks.structured --help`.

The same prompts are answered with JSON schemas, and without, in turns. Both kinds of answers have
the same number of tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import environment, workloads
from benchmarks.common.counters import counters_of, since
from benchmarks.common.harness import Benchmark, arguments_of, print_table
from benchmarks.common.policies import add_policy_options, parse_policies
from benchmarks.common.repeats import Figures, add_repeats, ratios, summary
from benchmarks.common.serving import Runtimes
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
    found: dict[str, list[Figures]] = {"with": [], "without": []}
    with Runtimes(options) as open_runtimes:
        rt = open_runtimes.open(parse_policies(options.policies)[0])
        items = workloads.items(options, rt)
        begin_s = time.perf_counter()
        _played(rt, items, _constrained(options, len(items)))
        first_s = time.perf_counter() - begin_s  # grammars are compiled, the vocabulary is read
        for repeat in range(options.repeats):
            print(f"run {repeat + 1} of {options.repeats}", file=sys.stderr)
            figures, lengths = _played(rt, items, _constrained(options, len(items)))
            found["with"].append(figures)
            figures, _ = _played(rt, items, [_free(options, max(1, each)) for each in lengths])
            found["without"].append(figures)
    share = ratios(*([run["tokens_per_s"] for run in found[name]] for name in ("with", "without")))
    return {
        "benchmark": "structured",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "first_run_s": first_s,
        **{name: summary(runs) for name, runs in found.items()},
        "costs": summary([{"throughput_share": each} for each in share]),
        **environment.describe(),
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
    rt.forget_kept_pages()
    before, begin_s = counters_of(rt.stats()), time.perf_counter()
    answers = rt.generate([list(item.prompt_token_ids) for item in items], params, progress=True)
    wall_s = time.perf_counter() - begin_s
    lengths = [len(answer.token_ids) for answer in answers]
    num_tokens = sum(lengths)
    engine = since(before, counters_of(rt.stats()))
    figures = {
        "wall_s": wall_s,
        "num_failed": sum(answer.error is not None for answer in answers),
        "num_ended": sum(answer.finish_reason == "stop" for answer in answers),
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / wall_s,
        "token_s": wall_s / max(1, num_tokens),
        "mask_token_s": engine["mask_s"] / max(1, num_tokens),
        "forced_share": engine["num_forced"] / max(1, num_tokens),
        "host_gap_share": engine["host_gap_s"] / engine["busy_s"] if engine["busy_s"] else 0.0,
    }
    return figures, lengths


def _is_whole(result: dict[str, Any]) -> bool:
    return not result["with"]["num_failed"] and not result["without"]["num_failed"]


def _print_table(result: dict[str, Any]) -> None:
    print_table(
        [{"grammars": name, **result[name]} for name in ("with", "without")],
        ("grammars", "{grammars}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("ms a token", lambda row: f"{row['token_s'] * 1e3:.2f}"),
        ("mask ms a token", lambda row: f"{row['mask_token_s'] * 1e3:.3f}"),
        ("forced", "{forced_share:.0%}"),
        ("host gap", "{host_gap_share:.0%}"),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    workloads.add_arguments(parser)
    parser.add_argument("--temperature", type=float, default=1.0, help="of both ways; 0 is greedy")
    add_repeats(parser, "way")
    add_policy_options(parser, policies="auto", max_context=1024)


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table, is_whole=_is_whole)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
