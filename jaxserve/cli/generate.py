"""`jaxserve generate`, which answers a batch of prompts as JSON lines."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import Annotated, TextIO

import typer

from jaxserve.cli import options as opt
from jaxserve.cli import prompts
from jaxserve.cli.flat import flat
from jaxserve.cli.groups import ProcessOptions, SamplingOptions, ServiceOptions
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams

# Tokens up to which answers come before steps with huge pages save what a start with them costs.
_FEW_TOKENS = 256


@flat()
def generate(
    *,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts, one per argument.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File of prompts, one per line.")
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            "--jsonl",
            help='Prompts as JSON lines: {"prompt": text or token ids} or {"messages": [...]}, '
            "optionally with an id and sampling parameters.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here, not to stdout.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print only the answers' text.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Wrap text prompts in the chat template, or not. [default: if the model has one]",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message for chat prompts.")
    ] = None,
    max_tokens: opt.MaxTokens = 256,
    sampling: SamplingOptions,
    n: Annotated[
        int,
        typer.Option("--n", help="Number of samples for each prompt.", rich_help_panel="Sampling"),
    ] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            help="Also return log-probabilities: 0 for the token's own, k for the k likeliest.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    service_options: ServiceOptions,
    processes: ProcessOptions,
) -> None:
    """Answer a batch of prompts from arguments or a file, as JSON lines in the same order.

    Ctrl-C writes the finished answers and exits with 130.
    """
    with opt.exit_codes():
        params = sampling.params(
            max_tokens=max_tokens, n=n, logprobs=logprobs, adapter=service_options.only_adapter
        )
        jobs = _read_jobs(prompt, file, jsonl, params)
        is_long = sum(job.params.n * (job.params.max_tokens or inf) for job in jobs) > _FEW_TOKENS
        answers = processes.join()
        with (
            _sink(output if answers else None) as sink,
            service_options.open(model, huge_pages=is_long) as service,
        ):
            tokenizer = service.tokenizer
            has_template = tokenizer is not None and tokenizer.chat_template is not None
            if has_template if chat is None else chat:
                jobs = [prompts.as_chat(job, system) for job in jobs]
            done = service.generate(
                [job.prompt for job in jobs],
                [job.params for job in jobs],
                progress=not service_options.quiet,
            )
            _write(jobs, done, sink, text_only=text)
    code = _exit_code(done)
    if code:
        raise typer.Exit(code)


def _read_jobs(
    arguments: list[str] | None, file: Path | None, jsonl: Path | None, params: SamplingParams
) -> list[prompts.Job]:
    given = [source for source in (arguments, file, jsonl) if source]
    if len(given) != 1:
        raise InvalidConfigError(
            "pass prompts in exactly one way: as arguments, with --file, or with --jsonl"
        )
    if file:
        jobs = prompts.from_text_file(file, params)
    elif jsonl:
        jobs = prompts.from_jsonl(jsonl, params)
    else:
        jobs = prompts.from_arguments(arguments or [], params)
    if not jobs:
        raise InvalidConfigError(f"{file or jsonl} holds no prompts; put one on each line")
    return jobs


def _sink(output: Path | None) -> AbstractContextManager[TextIO]:
    if output is None:
        return nullcontext(sys.stdout)
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(
            f"cannot write --output: {error}; name a file in a folder that can be written"
        ) from error


def _write(
    jobs: list[prompts.Job], done: list[Completion], sink: TextIO, *, text_only: bool
) -> None:
    """Write every completion that is not cancelled; write errors to stderr too."""
    for job, completion in zip(jobs, done, strict=True):
        if completion.error is not None:
            typer.echo(f"prompt {job.id}: {opt.describe(completion.error)}", err=True)
        elif completion.finish_reason == "cancelled":
            continue
        if not text_only:
            print(prompts.to_json_line(job, completion), file=sink)
        elif completion.error is None:
            print("\n".join(sample.text for sample in completion.samples), file=sink)


def _exit_code(done: list[Completion]) -> int:
    if any(item.error is None and item.finish_reason == "cancelled" for item in done):
        return opt.EXIT_INTERRUPTED
    return opt.EXIT_FAILED if any(item.error is not None for item in done) else 0
