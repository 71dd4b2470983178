"""`jaxserve bench`: a small offline measurement on random prompts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Annotated

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.options import ProcessOptions, ServiceOptions, flat


@flat()
def bench(
    *,
    num_requests: Annotated[
        int, typer.Option("--num-requests", help="Number of requests, submitted at once.")
    ] = 32,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Tokens of each prompt.")
    ] = 64,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", help="Tokens of each answer.")
    ] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random prompts.")] = 0,
    model: opt.Model = opt.DEFAULT_MODEL,
    service_options: ServiceOptions,
    processes: ProcessOptions,
) -> None:
    """Measure throughput and latency on random prompts, and print one JSON object.

    Every answer has exactly the given length. For real prompts and the matching rooflines, use
    `python -m benchmarks.offline` from a checkout.
    """
    with opt.exit_codes():
        from jaxserve.core.metrics import summarise
        from jaxserve.workload import random_items

        started_s = time.perf_counter()
        processes.join()
        adapter = service_options.only_adapter
        with service_options.open(model) as service:
            ready_s = time.perf_counter()
            items = random_items(
                num_requests,
                num_prompt_tokens=prompt_tokens,
                num_output_tokens=output_tokens,
                vocab_size=service.vocab_size,
                seed=seed,
            )
            begin_s = time.perf_counter()
            done = service.generate(
                [list(item.prompt_token_ids) for item in items],
                [replace(item.params(), adapter=adapter) for item in items],
                progress=not service_options.quiet,
            )
            wall_s = time.perf_counter() - begin_s
        for error in {opt.describe(item.error) for item in done if item.error is not None}:
            typer.echo(error, err=True)
    report = {
        "workload": f"random({prompt_tokens}, {output_tokens})",
        "model": model,
        "policy": service_options.policy,
        "seed": seed,
        "startup_s": ready_s - started_s,
        **summarise(done, wall_s),
    }
    typer.echo(json.dumps(report))
    if any(item.error is not None for item in done):
        raise typer.Exit(opt.EXIT_FAILED)
