"""The workloads of `--workload NAME`, their options, and their arrivals."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

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


def add_arguments(
    parser: argparse.ArgumentParser, *, num_requests: str = f"{NUM_REQUESTS}"
) -> None:
    """Add the options that choose requests and the lengths of their answers.

    `num_requests` is a benchmark's default number, in words.
    """
    add = parser.add_argument_group("workload").add_argument
    add("--workload", type=_known, default="sharegpt", help=KNOWN)
    add(
        "--num-requests",
        type=int,
        default=None,
        help=f"{num_requests} by default, or all that were recorded",
    )
    add("--seed", type=int, default=0, help="of the draw of the requests and of the arrivals")
    add("--prompt-tokens", type=int, default=16, help="uniform: of each prompt")
    add("--min-output-tokens", type=int, default=None, help="uniform: of the shortest answer")
    add("--output-tokens", type=int, default=128, help="sharegpt, uniform: of the longest answer")
    add("--max-prompt-tokens", type=int, default=512, help="sharegpt: longer ones are left out")
    add("--output-scale", type=float, default=1.0, help="sharegpt: multiplies answers' lengths")
    add(
        "--unlimited",
        action="store_true",
        help="sharegpt: requests set no limit but the context, so policies know none",
    )
    add(
        "--held-out",
        action="store_true",
        help="sharegpt: only conversations that predictors are not trained on",
    )
    add("--scale", type=float, default=1.0, help="task: multiplies every length")


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
    from predictor.data import Example, split_in_three

    return bool(split_in_three([Example("-", 1, conversation)], held_out=HELD_OUT)[2])


def _known(workload: str) -> str:
    """Return the name, for argparse, which refuses an unknown one before a model is loaded."""
    tasks = [_TASK + name for name in TASKS]
    is_trace = workload.startswith(_RECORDED)
    if not is_trace and workload not in ("sharegpt", "uniform", *tasks):
        raise argparse.ArgumentTypeError(f"{workload!r} is unknown; give {KNOWN}")
    return workload
