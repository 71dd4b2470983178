"""The workloads of `--workload NAME`, their options, and their arrivals."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from benchmarks.common.harness import Option, option
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import WorkloadItem, random_items
from jaxserve.workload.items import with_arrivals
from jaxserve.workload.recorded import recorded_items
from jaxserve.workload.tasks import TASKS, task_items

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

KNOWN = (
    f"sharegpt, uniform, task:NAME with NAME one of {', '.join(TASKS)}, or recorded:FILE with a "
    "file written by record=... or --record"
)
_TASK = "task:"
_RECORDED = "recorded:"
NUM_REQUESTS = 32
ARRIVALS = "all, constant:SECONDS or poisson:RATE; all by default, or as they were recorded"
# Share of the conversations that a predictor is calibrated on; as many test it.
HELD_OUT = 0.15


def options(*, many: str = f"{NUM_REQUESTS}", **defaults: Any) -> tuple[Option, ...]:
    """Return the options that choose requests and the lengths of their answers.

    Args:
      many: a benchmark's default number of requests, in words.
      defaults: of options, by name, where a benchmark has others.
    """
    found = (
        option("--workload", "sharegpt", KNOWN, _known),
        option("--num-requests", None, f"{many} by default, or all that were recorded", int),
        option("--seed", 0, "of the draw of the requests and of the arrivals"),
        option("--prompt-tokens", 16, "uniform: of each prompt"),
        option("--min-output-tokens", None, "uniform: of the shortest answer", int),
        option("--output-tokens", 128, "sharegpt, uniform: of the longest answer"),
        option("--max-prompt-tokens", 512, "sharegpt: longer ones are left out"),
        option("--output-scale", 1.0, "sharegpt: multiplies answers' lengths"),
        option("--unlimited", False, "sharegpt: requests set no limit but the context"),
        option("--held-out", False, "sharegpt: only conversations that predictors do not train on"),
        option("--scale", 1.0, "task: multiplies every length"),
    )
    for name, value in defaults.items():
        dict(found)[f"--{name.replace('_', '-')}"]["default"] = value
    return found


def items(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    """Return the requests that the options ask for.

    Drawn requests arrive at 0 s, recorded ones at their recorded times.
    """
    drawn = _draw(options, rt)
    longest = max((len(i.prompt_token_ids) + i.num_output_tokens for i in drawn), default=0)
    if longest > rt.config.max_context:
        raise InvalidConfigError(
            f"workload {options.workload!r} holds a request of {longest} tokens, and the context "
            f"has {rt.config.max_context}; raise --max-context, or give a --scale if it is a task"
        )
    return drawn


def is_recorded(options: argparse.Namespace) -> bool:
    """Return whether the requests come from a file."""
    return options.workload.startswith(_RECORDED)


def arriving_items(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    """Return the requests with the arrivals of `--arrivals`, the same for every policy."""
    drawn = items(options, rt)
    return (
        drawn if options.arrivals is None else with_arrivals(drawn, options.arrivals, options.seed)
    )


def _draw(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    if is_recorded(options):
        return recorded_items(options.workload.removeprefix(_RECORDED), options.num_requests)
    num = NUM_REQUESTS if options.num_requests is None else options.num_requests
    if options.workload == "sharegpt":
        from jaxserve.workload import sharegpt

        assert rt.tokenizer is not None, "a registered model has a tokenizer"

        return sharegpt.sample(
            num,
            options.seed,
            tokenizer=rt.tokenizer,
            max_prompt_tokens=options.max_prompt_tokens,
            max_output_tokens=options.output_tokens,
            output_scale=options.output_scale,
            is_limit_known=not options.unlimited,
            accepts=is_tested_on if options.held_out else lambda _: True,
        )
    if options.workload == "uniform":
        return random_items(
            num,
            num_prompt_tokens=options.prompt_tokens,
            num_output_tokens=options.output_tokens,
            min_output_tokens=options.min_output_tokens,
            vocab_size=rt.model_config.vocab_size,
            seed=options.seed,
        )
    return task_items(
        options.workload.removeprefix(_TASK),
        num,
        vocab_size=rt.model_config.vocab_size,
        seed=options.seed,
        scale=options.scale,
    )


def is_tested_on(conversation: str) -> bool:
    """Return whether a conversation of ShareGPT is in the part that tests predictors.

    The split is the default of `jaxserve predictor train` and benchmarks.lengths.predictor.
    """
    from jaxserve.predictor.data import Example, split_in_three

    return bool(split_in_three([Example("-", 1, conversation)], held_out=HELD_OUT)[2])


def _known(workload: str) -> str:
    """Return the name, for argparse, which refuses an unknown one before a model is loaded."""
    tasks = [_TASK + name for name in TASKS]
    is_trace = workload.startswith(_RECORDED)
    if not is_trace and workload not in ("sharegpt", "uniform", *tasks):
        raise argparse.ArgumentTypeError(f"{workload!r} is unknown; give {KNOWN}")
    return workload
