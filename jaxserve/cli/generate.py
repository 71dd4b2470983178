"""`jaxserve generate`, which answers a batch of prompts as JSON lines."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, TextIO, final

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.options import ProcessOptions, SamplingOptions, ServiceOptions, flat
from jaxserve.core.errors import GenerationInterrupted, InvalidConfigError, InvalidRequestError
from jaxserve.core.request import Completion, Sample, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams

# Up to this many tokens, answers arrive before huge pages save what starting with them costs.
_FEW_TOKENS = 256
_MAX_TOKENS = 256  # of an answer, by default

Message = dict[str, str]
Prompt = str | list[int] | list[Message]

_MAX_DIGITS = 18  # of a token id
_PROMPT_KEYS = ("prompt", "messages")
_PARAM_KEYS = tuple(field.name for field in fields(SamplingParams) if field.name != "pools")


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
    max_tokens: opt.MaxTokens = _MAX_TOKENS,
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

    Ctrl-C writes the finished answers and exits with 130. `jaxserve run-batch` answers OpenAI's
    batch lines.
    """
    with opt.exit_codes():
        params = sampling.params(
            max_tokens=max_tokens, n=n, logprobs=logprobs, adapter=service_options.only_adapter
        )
        if jsonl and not (prompt or file) and _is_batch(lines_of(jsonl)):
            raise InvalidConfigError(
                f"the lines of {jsonl} are OpenAI's batch lines; answer them with `jaxserve "
                f"run-batch -i {jsonl} -o OUTPUT`"
            )
        jobs = _read_jobs(prompt, file, jsonl, params)
        is_long = sum(job.params.n * (job.params.max_tokens or inf) for job in jobs) > _FEW_TOKENS
        # One answer ends before executables that only further requests need would be compiled.
        warmup = "one_request" if len(jobs) == 1 and jobs[0].params.n == 1 else "background"
        answers = processes.join()
        with (
            opened(output if answers else None) as sink,
            service_options.open(model, huge_pages=is_long, warmup=warmup) as service,
        ):
            tokenizer = service.tokenizer
            has_template = tokenizer is not None and tokenizer.chat_template is not None
            if has_template if chat is None else chat:
                jobs = [as_chat(job, system) for job in jobs]
            is_interrupted = False
            try:
                done = service.generate(
                    [job.prompt for job in jobs],
                    [job.params for job in jobs],
                    progress=not service_options.quiet,
                )
            except GenerationInterrupted as interrupted:
                done, is_interrupted = interrupted.completions, True
                typer.echo("interrupted", err=True)
            _write(jobs, done, sink, text_only=text)
    code = opt.EXIT_INTERRUPTED if is_interrupted else _exit_code(done)
    if code:
        raise typer.Exit(code)


def _is_batch(lines: Sequence[str]) -> bool:
    """Return whether the first line that is an object is one of OpenAI's batches."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                return "custom_id" in found or "body" in found
    return False


def _read_jobs(
    arguments: list[str] | None, file: Path | None, jsonl: Path | None, params: SamplingParams
) -> list[BatchJob]:
    given = [source for source in (arguments, file, jsonl) if source]
    if len(given) != 1:
        raise InvalidConfigError(
            "pass prompts in exactly one way: as arguments, with --file, or with --jsonl"
        )
    if file:
        jobs = from_text_file(file, params)
    elif jsonl:
        jobs = from_jsonl(jsonl, params)
    else:
        jobs = from_arguments(arguments or [], params)
    if not jobs:
        raise InvalidConfigError(f"{file or jsonl} holds no prompts; put one on each line")
    return jobs


def opened(output: Path | None) -> AbstractContextManager[TextIO]:
    """Return a file to write to, or stdout."""
    if output is None:
        return nullcontext(sys.stdout)
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(
            f"cannot write --output: {error}; name a file in a folder that can be written"
        ) from error


def _write(jobs: list[BatchJob], done: list[Completion], sink: TextIO, *, text_only: bool) -> None:
    """Write every completion that is not cancelled; write errors to stderr too."""
    for job, completion in zip(jobs, done, strict=True):
        if completion.error is not None:
            typer.echo(f"prompt {job.id}: {opt.describe(completion.error)}", err=True)
        elif completion.finish_reason == "cancelled":
            continue
        if not text_only:
            print(to_json_line(job, completion), file=sink)
        elif completion.error is None:
            print("\n".join(sample.text for sample in completion.samples), file=sink)


def _exit_code(done: list[Completion]) -> int:
    if any(item.error is None and item.finish_reason == "cancelled" for item in done):
        return opt.EXIT_INTERRUPTED
    return opt.EXIT_FAILED if any(item.error is not None for item in done) else 0


@final
@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One prompt of the batch, its parameters, and the id of its output line."""

    id: Any
    prompt: Prompt
    params: SamplingParams


def from_arguments(prompts: Sequence[str], params: SamplingParams) -> list[BatchJob]:
    return [BatchJob(id=i, prompt=prompt, params=params) for i, prompt in enumerate(prompts)]


def from_text_file(path: Path, params: SamplingParams) -> list[BatchJob]:
    return from_arguments([line for line in lines_of(path) if line.strip()], params)


def from_jsonl(path: Path, params: SamplingParams) -> list[BatchJob]:
    """Return a job for each line that is not blank.

    A line is an object with `prompt` (text or token ids) or `messages`, optionally with an `id` and
    with sampling parameters that differ from `params`; another line is an InvalidRequestError.
    """
    jobs = []
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            jobs.append(_job(json.loads(line), len(jobs), params))
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"{path} line {number} is not JSON: {error}") from error
        except InvalidRequestError as error:
            raise type(error)(f"{path} line {number}: {error}") from error
        except (ValueError, RecursionError) as error:  # a number of many digits, or deep nesting
            raise InvalidRequestError(f"{path} line {number} cannot be read: {error}") from error
    return jobs


def as_chat(job: BatchJob, system: str | None) -> BatchJob:
    """Return the job with a text prompt as chat messages; other prompts are unchanged.

    An empty text is unchanged, too, so that the service refuses it as it does without a chat.
    """
    if not isinstance(job.prompt, str) or not job.prompt:
        return job
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    return replace(job, prompt=[*head, {"role": "user", "content": job.prompt}])


def to_json_line(job: BatchJob, completion: Completion) -> str:
    """Return a completion as a line of JSON; several samples are a list, `samples`."""
    record: dict[str, object] = {"id": job.id, "prompt": job.prompt}
    samples = [_sample(sample) for sample in completion.samples]
    if job.params.n > 1:
        record["samples"] = samples
    elif samples:
        record |= samples[0]
    record["prompt_tokens"] = len(completion.prompt_token_ids)
    if completion.prompt_logprobs is not None:
        record["prompt_logprobs"] = [e and _logprob(e) for e in completion.prompt_logprobs]
    if completion.error is not None:
        record["finish_reason"] = "error"
        record["error"] = {
            "type": type(completion.error).__name__,
            "message": str(completion.error),
        }
    return json.dumps(record, ensure_ascii=False)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file; raise InvalidRequestError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").split("\n")  # JSON may contain other separators
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"cannot read prompts from {path}: {error}; pass a UTF-8 text file"
        ) from error


def _job(record: object, index: int, params: SamplingParams) -> BatchJob:
    if not isinstance(record, Mapping):
        raise InvalidRequestError(
            'a line must be an object such as {"prompt": "..."} or {"messages": [...]}'
        )
    unknown = set(record) - {"id", *_PROMPT_KEYS, *_PARAM_KEYS}
    if unknown:
        raise InvalidRequestError(
            f"unknown field(s) {', '.join(sorted(unknown))}; allowed are id, prompt, messages and "
            f"the sampling parameters {', '.join(_PARAM_KEYS)}"
        )
    given = [key for key in _PROMPT_KEYS if key in record]
    if len(given) != 1:
        raise InvalidRequestError(
            f"pass exactly one of prompt and messages, not {' and '.join(given) or 'neither'}"
        )
    prompt = record[given[0]]
    if not isinstance(prompt, (str, list)):
        raise InvalidRequestError(
            f"{given[0]}={prompt!r} is not allowed; pass text, a list of token ids or messages"
        )
    changes = {key: record[key] for key in _PARAM_KEYS if key in record}
    if isinstance(changes.get("logit_bias"), Mapping):
        # JSON object keys are always text.
        bias = changes["logit_bias"]
        changes["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    return BatchJob(id=record.get("id", index), prompt=prompt, params=replace(params, **changes))


def _token_id(key: str) -> int:
    if not key.isdecimal() or len(key) > _MAX_DIGITS:
        raise InvalidRequestError(
            f"logit_bias key {reprlib.repr(key)} is not a token id; pass whole numbers as keys"
        )
    return int(key)


def _sample(sample: Sample) -> dict[str, object]:
    shown: dict[str, object] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "output_tokens": len(sample.token_ids),
    }
    if sample.logprobs is not None:
        shown["logprobs"] = [_logprob(entry) for entry in sample.logprobs]
    return shown


def _logprob(entry: TokenLogprob) -> dict[str, object]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [list(pair) for pair in entry.top],
    }
