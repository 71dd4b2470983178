"""Throughput of a batch that arrives all at once: `python -m benchmarks.offline --help`.

Prints one JSON object. Answers have exactly the workload's lengths, which the scheduler does not
know. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.output import emit, run_or_explain
from jaxserve.core.metrics import summarise
from jaxserve.workload import WorkloadItem, random_items

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

WORKLOADS = ("sharegpt", "random")


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    options = _parser().parse_args(arguments)
    result = run_or_explain(run, options)
    if result is None:
        return 2
    emit(result, options.output)
    return 1 if result["num_failed"] else 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One measured run, and everything that is needed to repeat it."""
    from benchmarks import environment, startup
    from jaxserve import Runtime
    from jaxserve.engine.assembly import platform_defaults

    settings = _runtime_settings(options)
    starts = startup.measure(options.model, settings) if options.cold else None
    begin_s = time.perf_counter()
    with Runtime.from_pretrained(options.model, **settings) as rt:
        ready_s = time.perf_counter() - begin_s
        items = _workload(options, rt)
        begin_s = time.perf_counter()
        done = rt.generate(
            [list(item.prompt_token_ids) for item in items],
            [item.params() for item in items],
            progress=True,
        )
        wall_s = time.perf_counter() - begin_s
        # Before the bound's own weights add to it.
        peak_host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        counters = asdict(rt.stats())
        config = rt.model_config
        sizes = (rt.config.max_slots, rt.config.max_step_tokens)
    dtype = options.dtype or platform_defaults().dtype
    figures = summarise(done, wall_s)
    return {
        "benchmark": "offline",
        "workload": options.workload,
        "num_requests": options.num_requests,
        "seed": options.seed,
        "model": options.model,
        "precision": dtype,
        "policy": options.policy,
        "settings": settings,
        **figures,
        "host_gap_share": counters["host_gap_s"] / counters["busy_s"],
        "peak_host_bytes": peak_host_bytes,
        "startup_s": ready_s,
        "startup": starts,
        "engine": counters,
        "bound": _bound(config, sizes, dtype, figures),
        **environment.describe(),
    }


def _bound(config: Any, sizes: tuple[int, int], dtype: str, figures: dict) -> dict[str, float]:
    from benchmarks import roofline

    print("timing the matrix products alone", file=sys.stderr)
    max_slots, max_step_tokens = sizes
    batch_size = min(max_slots, figures["num_requests"])
    bound = roofline.measure(config, batch_size=batch_size, chunk_size=max_step_tokens, dtype=dtype)
    whole = bound.output_tokens_per_s(
        num_prompt=figures["prompt_tokens"], num_output=figures["output_tokens"]
    )
    return {
        **asdict(bound),
        "decode_tokens_per_s": bound.decode_tokens_per_s,
        "prefill_tokens_per_s": bound.prefill_tokens_per_s,
        "output_tokens_per_s": whole,
        "reached": figures["output_tokens_per_s"] / whole,
    }


def _workload(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    if options.workload == "random":
        return random_items(
            options.num_requests,
            num_prompt_tokens=options.prompt_tokens,
            num_output_tokens=options.output_tokens,
            vocab_size=rt.model_config.vocab_size,
            seed=options.seed,
        )
    from jaxserve.workload import sharegpt

    return sharegpt.sample(
        options.num_requests,
        options.seed,
        tokenizer=rt.tokenizer,
        max_prompt_tokens=options.max_prompt_tokens,
        max_output_tokens=options.max_output_tokens,
    )


def _runtime_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("policy", "load", "dtype", "kv_memory", "max_slots", "max_context", "max_step_tokens")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline",
        description="Throughput of requests that arrive all at once; prints one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="sharegpt", help="what is asked")
    add("--num-requests", type=int, default=64, help="how many, all at once")
    add("--seed", type=int, default=0, help="of the workload's draw")
    add("--max-prompt-tokens", type=int, default=512, help="sharegpt: longer prompts are left out")
    add("--max-output-tokens", type=int, default=256, help="sharegpt: longer answers are cut")
    add("--prompt-tokens", type=int, default=64, help="random: of each prompt")
    add("--output-tokens", type=int, default=64, help="random: of each answer")
    add("--model", default="smollm2-135m", help="a name, folder or GGUF file")
    add("--policy", default="auto", help="scheduling preset")
    add("--load", default=None, help="random for weights made up on the spot")
    add("--dtype", default=None, help="of weights and cache")
    add("--kv-memory", default=None, help='size of the page pool, e.g. "1GiB"')
    add("--max-slots", type=int, default=None, help="most sequences at once")
    add("--max-context", type=int, default=1024, help="most tokens of prompt and answer")
    add("--max-step-tokens", type=int, default=None, help="most tokens of one step")
    add("--cold", action="store_true", help="also time a cold and a warm start, in processes apart")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
