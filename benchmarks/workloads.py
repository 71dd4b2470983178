"""The workloads that benchmarks know: `--workload NAME` and the options that belong to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import WorkloadItem, random_items
from jaxserve.workload.arrivals import with_arrivals
from jaxserve.workload.tasks import TASKS, task_items

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

KNOWN = f"sharegpt, uniform, or task:NAME with NAME one of {', '.join(TASKS)}"
_TASK = "task:"


def add_workload_options(parser: argparse.ArgumentParser, *, num_requests: int = 32) -> None:
    """Options for `items_of`; `num_requests` is the benchmark's own default."""
    add = parser.add_argument_group("workload").add_argument
    add("--workload", type=_known, default="sharegpt", help=KNOWN)
    add("--arrivals", default="all", help="all, constant:SECONDS or poisson:RATE")
    add("--num-requests", type=int, default=num_requests, help="how many")
    add("--seed", type=int, default=0, help="of the workload's draw and the arrivals")
    add("--prompt-tokens", type=int, default=16, help="uniform: of each prompt")
    add("--min-output-tokens", type=int, default=None, help="uniform: of the shortest answer")
    add("--output-tokens", type=int, default=128, help="sharegpt, uniform: of the longest answer")
    add("--scale", type=float, default=1.0, help="task: multiplies every length")


def items_of(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    """The requests that the options describe, for this runtime's model, with their arrivals.

    Raises:
      InvalidConfigError: options out of range, or requests that do not fit in the context.
    """
    items = with_arrivals(_draw(options, rt), options.arrivals, options.seed)
    longest = max((len(i.prompt_token_ids) + i.num_output_tokens for i in items), default=0)
    if longest > rt.config.max_context:
        raise InvalidConfigError(
            f"workload {options.workload!r} holds a request of {longest} tokens, and the context "
            f"has {rt.config.max_context}; raise --max-context, or give a --scale if it is a task"
        )
    return items


def _draw(options: argparse.Namespace, rt: Runtime) -> Sequence[WorkloadItem]:
    if options.workload == "sharegpt":
        from jaxserve.workload import sharegpt

        return sharegpt.sample(
            options.num_requests,
            options.seed,
            tokenizer=rt.tokenizer,
            max_output_tokens=options.output_tokens,
        )
    if options.workload == "uniform":
        return random_items(
            options.num_requests,
            num_prompt_tokens=options.prompt_tokens,
            num_output_tokens=options.output_tokens,
            min_output_tokens=options.min_output_tokens,
            vocab_size=rt.model_config.vocab_size,
            seed=options.seed,
        )
    return task_items(
        options.workload.removeprefix(_TASK),
        options.num_requests,
        vocab_size=rt.model_config.vocab_size,
        seed=options.seed,
        scale=options.scale,
    )


def _known(workload: str) -> str:
    """The name itself; for argparse, which says what is wrong before anything is loaded."""
    tasks = [_TASK + name for name in TASKS]
    if workload not in ("sharegpt", "uniform", *tasks):
        raise argparse.ArgumentTypeError(f"{workload!r} is unknown; give {KNOWN}")
    return workload
