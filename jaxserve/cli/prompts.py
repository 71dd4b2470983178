"""Functions that read prompts from arguments and files, and write completions as JSON lines."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidRequestError
from jaxserve.core.request import Completion, Sample, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams

Message = dict[str, str]
Prompt = str | list[int] | list[Message]

_MAX_DIGITS = 18  # of a token id
_PROMPT_KEYS = ("prompt", "messages")
_PARAM_KEYS = tuple(field.name for field in fields(SamplingParams))


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt of the batch, its parameters, and the id of its output line."""

    id: Any
    prompt: Prompt
    params: SamplingParams


def from_arguments(prompts: Sequence[str], params: SamplingParams) -> list[Job]:
    """Return a job for each argument, numbered from 0."""
    return [Job(id=i, prompt=prompt, params=params) for i, prompt in enumerate(prompts)]


def from_text_file(path: Path, params: SamplingParams) -> list[Job]:
    """Return a job for each line that is not blank.

    Raises:
      InvalidRequestError: the file cannot be read.
    """
    return from_arguments([line for line in _lines(path) if line.strip()], params)


def from_jsonl(path: Path, params: SamplingParams) -> list[Job]:
    """Return a job for each line that is not blank.

    A line is an object with `prompt` (text or token ids) or `messages`, optionally with an `id` and
    with sampling parameters that differ from `params`.

    Raises:
      InvalidRequestError: a line is not such an object.
    """
    jobs = []
    for number, line in enumerate(_lines(path), start=1):
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


def as_chat(job: Job, system: str | None) -> Job:
    """Return the job with a text prompt as chat messages; other prompts stay as they are.

    An empty text stays, too, so that the service refuses it as it does without a chat.
    """
    if not isinstance(job.prompt, str) or not job.prompt:
        return job
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    return replace(job, prompt=[*head, {"role": "user", "content": job.prompt}])


def to_json_line(job: Job, completion: Completion) -> str:
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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # JSON may contain other separators
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"cannot read prompts from {path}: {error}; pass a UTF-8 text file"
        ) from error


def _job(record: object, index: int, params: SamplingParams) -> Job:
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
    return Job(id=record.get("id", index), prompt=prompt, params=replace(params, **changes))


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
