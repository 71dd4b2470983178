"""Throughput of requests that arrive all at once: `python -m benchmarks.offline --help`.

Prints one JSON object. Answers have exactly the workload's lengths, which the scheduler does not
know; docs/benchmarks/serving.md says what each figure means.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.counters import counters_of, since
from benchmarks.common.output import command
from benchmarks.common.repeats import Figures, add_repeats, in_turns, summary
from benchmarks.offline.peers.options import add_arguments, any_failed, peers_of, run_peers
from benchmarks.startup.starts import start_times
from jaxserve.core.metrics import summarise
from jaxserve.workload import WorkloadItem, random_items

if TYPE_CHECKING:
    from jaxserve.core.config import EngineConfig
    from jaxserve.models.families.llama import LlamaConfig
    from jaxserve.report import Report
    from jaxserve.runtime import Runtime

WORKLOADS = ("sharegpt", "random")
# For the engine to see that it has no more work.
_SETTLING_S = 0.02


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), is_whole=_is_whole)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of whole runs, and everything that is needed to repeat them."""
    from benchmarks.common import environment
    from jaxserve import Runtime
    from jaxserve.execution.sizes import platform_defaults

    peers = peers_of(options)
    turns = in_turns([options.policy], options.repeats)
    settings = _runtime_settings(options)
    starts = start_times(options.model, settings) if options.cold else None
    begin_s = time.perf_counter()
    with Runtime.from_pretrained(options.model, warmup="full", **settings) as rt:
        ready_s = time.perf_counter() - begin_s
        items = _workload(options, rt)
        runs = [_run_once(rt, items) for _ in turns]
        # Before the weights of the bound add to it.
        peak_host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        config = rt.model_config
        engine, report = rt.config, rt.report()
    dtype = options.dtype or platform_defaults().dtype
    figures = summary(runs)
    return {
        "benchmark": "offline",
        "workload": options.workload,
        "num_requests": options.num_requests,
        "seed": options.seed,
        "model": options.model,
        "precision": dtype if engine.kv_dtype is None else f"{dtype} with KV in {engine.kv_dtype}",
        "quantize": options.quantize,
        "policy": options.policy,
        "settings": settings,
        "repeats": options.repeats,
        **figures,
        "peak_host_bytes": peak_host_bytes,
        "startup_s": ready_s,
        "startup": starts,
        **_compared_with_bound(config, engine, report, dtype, figures),
        "compare": run_peers(options, peers, items, batch_size=engine.max_slots, settings=settings),
        **environment.describe(),
    }


def _run_once(rt: Runtime, items: list[WorkloadItem]) -> Figures:
    """Generate all answers, with nothing in the prefix cache."""
    rt.forget_kept_pages()
    before, begin_s = counters_of(rt.stats()), time.perf_counter()
    done = rt.generate(
        [list(item.prompt_token_ids) for item in items],
        [item.params() for item in items],
        progress=True,
    )
    wall_s = time.perf_counter() - begin_s
    time.sleep(_SETTLING_S)
    engine = since(before, counters_of(rt.stats()))
    return {
        **summarise(done, wall_s),
        "host_gap_share": engine["host_gap_s"] / engine["busy_s"],
        "engine": engine,
    }


def _is_whole(result: dict[str, Any]) -> bool:
    return not result["num_failed"] and not any_failed(result["compare"])


def _compared_with_bound(
    config: LlamaConfig, engine: EngineConfig, report: Report, dtype: str, figures: dict[str, Any]
) -> dict[str, Any]:
    """Return the machine's bound, the share that the median run reached, and a step's parts."""
    from benchmarks.common import roofline
    from benchmarks.common.timing import full_step_s
    from benchmarks.offline import step_parts

    print("timing the machine and the parts of a step", file=sys.stderr)
    batch_size = min(engine.max_slots, figures["num_requests"])
    num_prompt, num_output = figures["prompt_tokens"], figures["output_tokens"]
    context = (num_prompt + num_output / 2) / figures["num_requests"]
    machine = roofline.measure_machine(dtype)
    bound = roofline.bound(
        *(machine, config, dtype),
        kv_dtype=engine.kv_dtype,
        batch_size=batch_size,
        context=context,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
    )
    parts = None
    if step_s := full_step_s(report.steps, batch_size):
        parts = step_parts.measure(
            *(config, engine, dtype),
            step_s=step_s,
            batch_size=batch_size,
            context=round(context),
        )
        step_parts.print_table(parts, bound)
    return {
        "machine": asdict(machine),
        "bound": {
            **asdict(bound),
            "output_tokens_per_s": num_output / bound.run_s,
            "reached": bound.run_s / figures["wall_s"],
        },
        "decode_step": parts and parts.to_dict(),
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

    assert rt.tokenizer is not None, "a registered model has a tokenizer"
    return sharegpt.sample(
        options.num_requests,
        options.seed,
        tokenizer=rt.tokenizer,
        max_prompt_tokens=options.max_prompt_tokens,
        max_output_tokens=options.max_output_tokens,
    )


def _runtime_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        *("policy", "load", "dtype", "quantize", "kv_memory", "kv_dtype"),
        *("max_slots", "max_context", "max_step_tokens"),
    )
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def build_parser() -> argparse.ArgumentParser:
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
    add("--load", default=None, help="random for random weights")
    add("--dtype", default=None, help="of weights and cache")
    add("--quantize", default=None, help="weights in few bits: int8, int4, or keep a GGUF's blocks")
    add("--kv-memory", default=None, help='size of the page pool, e.g. "1GiB"')
    add(
        "--kv-dtype",
        default=None,
        help="of keys and values, if not --dtype's: int8 or float8_e4m3fn",
    )
    add("--max-slots", type=int, default=None, help="most sequences at once")
    add("--max-context", type=int, default=1024, help="most tokens of prompt and answer")
    add("--max-step-tokens", type=int, default=None, help="most tokens of one step")
    add("--cold", action="store_true", help="also time a cold and a warm start in new processes")
    add_repeats(parser, "engine")
    add_arguments(parser)
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
