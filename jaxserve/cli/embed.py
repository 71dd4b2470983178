"""`jaxserve embed`, which writes embeddings of texts as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.generate import lines_of, opened
from jaxserve.cli.options import ServiceOptions, flat
from jaxserve.core.errors import InvalidConfigError, InvalidRequestError


@flat()
def embed(
    *,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts, one per argument; without any, see below.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File of texts, one per line.")
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            "--jsonl",
            help='Texts as JSON lines: {"text": text or token ids}, optionally with an id.',
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here, not to stdout.")
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", help="Leading numbers of each embedding to keep."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Whether embeddings have length 1. [default: as the model's files say]",
            show_default=False,
        ),
    ] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    service_options: ServiceOptions,
) -> None:
    """Embed texts from arguments, a file, or the lines of stdin, as JSON lines in their order."""
    with opt.exit_codes():
        if service_options.is_fleet:
            raise InvalidConfigError(
                "embed runs one runtime; omit --replicas and --roles, or use `jaxserve serve`"
            )
        jobs = _read(texts, file, jsonl)
        if not jobs:
            raise InvalidConfigError("there are no texts; pass at least one that is not empty")
        with opened(output) as sink, service_options.open(model) as service:
            runtime: Any = service
            found = runtime.embed(
                [text for _, text in jobs],
                normalize=normalize,
                dimensions=dimensions,
                adapter=service_options.only_adapter,
                progress=not service_options.quiet,
            )
            for (name, text), vector in zip(jobs, found, strict=True):
                record = {"id": name, "text": text, "embedding": vector.tolist()}
                print(json.dumps(record, ensure_ascii=False), file=sink)


def _read(
    texts: list[str] | None, file: Path | None, jsonl: Path | None
) -> list[tuple[Any, str | list[int]]]:
    """Return the id and the text of each job."""
    if sum(map(bool, (texts, file, jsonl))) > 1:
        raise InvalidConfigError(
            "pass texts in one way: as arguments, with --file, with --jsonl, or to stdin"
        )
    if jsonl:
        return _of_json(lines_of(jsonl), str(jsonl))
    if texts:
        return list(enumerate(texts))
    given = lines_of(file) if file else sys.stdin.read().split("\n")
    return list(enumerate(line for line in given if line.strip()))


def _of_json(lines: Iterable[str], where: str) -> list[tuple[Any, str | list[int]]]:
    jobs: list[tuple[Any, str | list[int]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{where} line {number} is not JSON: {error}") from error
        if not isinstance(record, Mapping) or not {"text"} <= set(record) <= {"id", "text"}:
            raise InvalidRequestError(
                f'{where} line {number} is not an object {{"text": text or token ids}}, with or '
                "without an id"
            )
        jobs.append((record.get("id", len(jobs)), record["text"]))
    return jobs
