"""`jaxserve bench`: a small offline measurement on random prompts."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from jaxserve.cli import options as opt


def bench(
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
    policy: opt.Policy = "auto",
    latency_bound: opt.LatencyBound = None,
    load: opt.Load = "auto",
    dtype: opt.DType = None,
    kv_memory: opt.KvMemory = None,
    kv_dtype: opt.KvDType = None,
    quantize: opt.Quantize = None,
    quantize_embeddings: opt.QuantizeEmbeddings = None,
    host_memory: opt.HostMemory = None,
    disk_memory: opt.DiskMemory = None,
    disk_folder: opt.DiskFolder = None,
    predictor: opt.Predictor = None,
    probe: opt.Probe = None,
    max_slots: opt.MaxSlots = None,
    max_context: opt.MaxContext = None,
    tensor_parallel: opt.TensorParallel = 1,
    groups: opt.Groups = None,
    replicas: opt.Replicas = 1,
    coordinator: opt.Coordinator = None,
    num_processes: opt.NumProcesses = None,
    process_id: opt.ProcessId = None,
    record: opt.Record = None,
    quiet: opt.Quiet = False,
) -> None:
    """Measure throughput and latency on random prompts, and print one JSON object.

    Every answer has exactly the given length. For real prompts and the matching rooflines, use
    `python -m benchmarks.offline` from a checkout.
    """
    with opt.exit_codes():
        from jaxserve.core.metrics import summarise
        from jaxserve.workload import random_items

        started_s = time.perf_counter()
        opt.join(coordinator, num_processes, process_id)
        with opt.open_service(
            model,
            policy=policy,
            latency_bound=latency_bound,
            load=load,
            dtype=dtype,
            kv_memory=kv_memory,
            kv_dtype=kv_dtype,
            quantize=quantize,
            quantize_embeddings=quantize_embeddings,
            host_memory=host_memory,
            disk_memory=disk_memory,
            disk_folder=disk_folder,
            predictor=predictor,
            probe=probe,
            max_slots=max_slots,
            max_context=max_context,
            tensor_parallel=tensor_parallel,
            groups=groups,
            replicas=replicas,
            record=record,
            quiet=quiet,
        ) as service:
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
                [item.params() for item in items],
                progress=not quiet,
            )
            wall_s = time.perf_counter() - begin_s
        for error in {opt.describe(item.error) for item in done if item.error is not None}:
            typer.echo(error, err=True)
    report = {
        "workload": f"random({prompt_tokens}, {output_tokens})",
        "model": model,
        "policy": policy,
        "seed": seed,
        "startup_s": ready_s - started_s,
        **summarise(done, wall_s),
    }
    typer.echo(json.dumps(report))
    if any(item.error is not None for item in done):
        raise typer.Exit(opt.EXIT_FAILED)
