"""`jaxserve run-batch`, which answers OpenAI's batch lines, and goes on where it stopped."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from jaxserve.cli import options as opt
from jaxserve.cli.generate import lines_of
from jaxserve.cli.options import ProcessOptions, ServiceOptions, flat
from jaxserve.core.errors import InvalidConfigError, MissingExtraError


@flat()
def run_batch(
    *,
    input_file: Annotated[
        Path,
        typer.Option(
            "--input-file",
            "-i",
            help='OpenAI\'s batch lines: {"custom_id", "method": "POST", "url", "body"}.',
        ),
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", help="Gets a line of output for each of them.")
    ],
    model: opt.Model = opt.DEFAULT_MODEL,
    service_options: ServiceOptions,
    processes: ProcessOptions,
) -> None:
    """Answer a file of requests, OpenAI's batch lines, with its lines of output.

    An answer is written when it is there, so the order may be another one. Answers with status 200
    that are in the output file already are kept, and their requests are not answered again: after
    Ctrl-C, which exits with 130, the same command goes on. A line that is wrong is answered with
    its error. The extra `serve` is needed.
    """
    with opt.exit_codes():
        try:
            from jaxserve.server.batch import answer_lines, id_of
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "fastapi", "serve", "run-batch") from error
        lines = lines_of(input_file)
        kept = _answered(output_file)
        answers = [kept.pop(id_of(line) or "", None) for line in lines]
        num_kept = sum(answer is not None for answer in answers)
        if num_kept:
            typer.echo(f"{num_kept} requests are answered in {output_file} already", err=True)
        leads = processes.join()
        num_failed, is_interrupted = 0, False
        with (
            _appending(output_file if leads else Path(os.devnull)) as sink,
            service_options.open(model, huge_pages=True) as service,
            tqdm(
                total=sum(bool(line.strip()) for line in lines),
                initial=num_kept,
                desc="answering",
                unit="request",
                leave=False,
                delay=2,
                disable=service_options.quiet,
            ) as bar,
        ):

            def write(answer: Mapping[str, Any]) -> None:
                nonlocal num_failed
                num_failed += not _is_good(answer)
                print(json.dumps(answer, ensure_ascii=False), file=sink, flush=True)
                bar.update()

            try:
                asyncio.run(answer_lines(service, model, lines, answers, write))
            except KeyboardInterrupt:
                is_interrupted = True
                typer.echo("stopped; the same command answers the rest", err=True)
        if num_failed:
            typer.echo(f"{num_failed} requests failed; their lines say why", err=True)
    if is_interrupted:
        raise typer.Exit(opt.EXIT_INTERRUPTED)
    if num_failed:
        raise typer.Exit(opt.EXIT_FAILED)


def _answered(output: Path) -> dict[str, dict[str, Any]]:
    """Return the good answers in the file by their ids, and leave only these in it."""
    if not output.exists():
        return {}
    found: dict[str, dict[str, Any]] = {}
    for line in lines_of(output):
        with suppress(ValueError, RecursionError):  # the end of a line that was being written
            answer = json.loads(line)
            if isinstance(answer, dict) and _is_good(answer):
                found[str(answer.get("custom_id"))] = answer
    rest = output.with_name(f"{output.name}.kept")
    try:
        with rest.open("w", encoding="utf-8") as file:
            for answer in found.values():
                print(json.dumps(answer, ensure_ascii=False), file=file)
        rest.replace(output)
    except OSError as error:
        raise _unwritable(error) from error
    return found


def _is_good(answer: Mapping[str, Any]) -> bool:
    response = answer.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def _appending(output: Path) -> Any:
    try:
        return output.open("a", encoding="utf-8")
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> InvalidConfigError:
    return InvalidConfigError(
        f"cannot write --output-file: {error}; name a file in a folder that can be written"
    )
