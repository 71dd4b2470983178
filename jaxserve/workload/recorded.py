"""Recorded traces: the requests of a live run and the lengths of their answers, for replay.

A trace has one line of JSON per request, written when the request ends:

    {"id": "request-0", "arrival_s": 0.25, "prompt_token_ids": [5, 6, 7],
     "params": {"max_tokens": 256, "temperature": 0.7, "seed": 4}, "priority": 0,
     "deadline_s": null, "num_output_tokens": [31], "finish_reasons": ["stop"], "finished_s": 2.5,
     "conversation_id": null, "output_token_ids": [[8, 9, 2]]}

Times are in seconds since the recording began. `params` holds the `SamplingParams` that differ from
their defaults, and always `max_tokens` and the seed that was used. A request for n samples has n
lengths, n reasons and n lists of tokens. Older traces lack the last two keys.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final, get_args

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import MAX_PRIORITY, Completion, FinishReason, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload.items import WorkloadItem

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """A line of a trace.

    Attributes:
      params: the request's parameters, with the seed that was used.
      num_output_tokens, finish_reasons: one per sample. A cancelled sample may have 0 tokens.
      output_token_ids: one tuple per sample; None in older traces.
      arrival_s, deadline_s, finished_s: seconds since the recording began.
    """

    id: str
    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    deadline_s: float | None
    num_output_tokens: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    finished_s: float
    conversation_id: str | None = None
    output_token_ids: tuple[tuple[int, ...], ...] | None = None

    def item(self, start_s: float = 0.0) -> WorkloadItem:
        """Return the same request with its answers forced to their recorded lengths.

        Stop strings, stop tokens, `min_tokens` and cancellation are not replayed, and an answer of
        0 tokens gets 1. The same model gives the same tokens, unless `min_tokens` forbade one. The
        item's arrival is relative to `start_s`.
        """
        lengths = tuple(max(1, length) for length in self.num_output_tokens)
        return WorkloadItem(
            prompt_token_ids=self.prompt_token_ids,
            num_output_tokens=max(lengths),
            sample_lengths=lengths if len(lengths) > 1 else None,
            max_tokens=self.params.max_tokens,
            arrival_s=self.arrival_s - start_s,
            sampling=replace(
                self.params, stop=(), stop_token_ids=(), min_tokens=0, forced_length=None
            ),
            priority=self.priority,
            deadline_s=None if self.deadline_s is None else self.deadline_s - self.arrival_s,
            conversation_id=self.conversation_id,
        )


@final
class TraceWriter:
    """A thread-safe writer of a trace, with one line per finished request.

    A full disk ends the recording with a logged error and affects no request.

    Args:
      path: a new or empty file.
      origin_s: time on the engine's clock at the start of the recording.

    Raises:
      InvalidConfigError: the file is not empty or not writable.
    """

    def __init__(self, path: str | Path, *, origin_s: float):
        check_is_free(path)
        self._origin_s = origin_s
        self._file = Path(path).open("a", encoding="utf-8")
        self._one_writer = threading.Lock()

    def append(self, request: Request, completion: Completion) -> None:
        """Write the line of a request whose samples have all ended."""

        def since(time_s: float | None) -> float | None:
            if time_s is None or not math.isfinite(time_s):
                return None
            return time_s - self._origin_s

        line = {
            "id": str(request.id),
            "arrival_s": since(request.arrival_s),
            "prompt_token_ids": request.given_prompt,
            "params": _changed(replace(request.params, seed=request.seed)),
            "priority": int(request.priority),
            "deadline_s": since(request.deadline_s),
            "num_output_tokens": [len(sample.token_ids) for sample in completion.samples],
            "finish_reasons": [sample.finish_reason for sample in completion.samples],
            "finished_s": since(completion.timing.finished_s),
            "conversation_id": request.conversation_id,
            "output_token_ids": [sample.token_ids for sample in completion.samples],
        }
        text = json.dumps(line, default=_plain) + "\n"
        with self._one_writer:
            if self._file.closed:
                return
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                _log.error("the recording %s has ended: %s", self._file.name, error)
                self.close()

    def close(self) -> None:
        with suppress(OSError):  # `append` has logged the error of a failed write
            self._file.close()


def check_is_free(path: str | Path) -> None:
    """Raise InvalidConfigError if `path` is not empty or not writable."""
    path = Path(path)
    if path.is_dir() or (path.exists() and path.stat().st_size):
        raise InvalidConfigError(
            f"record={str(path)!r} is not empty; pass another path, or remove the file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidConfigError(
            f"record={str(path)!r} cannot be written; pass a path in a writable folder"
        )


def read(path: str | Path) -> list[RecordedRequest]:
    """Read the requests of a trace, in order of arrival. An incomplete last line is skipped.

    Raises:
      InvalidConfigError: the file cannot be read, or a line is malformed; the message names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"cannot read the trace {path}: {error}; pass a file written by record=..."
        ) from error
    lines = text.split("\n")
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                requests.append(_parse(json.loads(line)))
        except json.JSONDecodeError as error:
            if number == len(lines):
                _log.warning("%s line %d is cut off and is skipped", path, number)
                continue
            raise InvalidConfigError(f"{path} line {number} is not JSON: {error}") from error
        except (ValueError, RecursionError) as error:  # a typed error, a long number, or nesting
            raise InvalidConfigError(f"{path} line {number}: {error}") from error
    return sorted(requests, key=lambda request: request.arrival_s)


def recorded_items(path: str | Path, num: int | None = None) -> list[WorkloadItem]:
    """Return the first `num` requests of a trace as a workload; the first arrives at 0.

    Raises:
      InvalidConfigError: see `read`, or the trace has fewer requests.
    """
    requests = read(path)
    if len(requests) < (num or 1):
        raise InvalidConfigError(
            f"num={num or 1} is more than the {len(requests)} requests of {path}; pass a smaller "
            "num"
        )
    return [request.item(requests[0].arrival_s) for request in requests[:num]]


def _changed(params: SamplingParams) -> dict[str, Any]:
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    if params.logit_bias is not None:
        given["logit_bias"] = {int(k): float(v) for k, v in params.logit_bias.items()}
    default = SamplingParams()
    return {k: v for k, v in given.items() if k == "max_tokens" or v != getattr(default, k)}


def _plain(number: Any) -> int | float:
    return operator.index(number) if hasattr(number, "__index__") else float(number)


def _parse(line: object) -> RecordedRequest:
    known = {field.name for field in fields(RecordedRequest)}
    if not isinstance(line, dict) or not known - _OPTIONAL <= set(line) <= known:
        given = sorted(line) if isinstance(line, dict) else line
        raise InvalidConfigError(f"{given!r} is not allowed; a line has the keys {sorted(known)}")
    for name, (is_allowed, allowed) in _ALLOWED.items():
        if name in line and not is_allowed(line[name]):
            raise InvalidConfigError(f"{name}={line[name]!r} is not allowed; use {allowed}")
    converted: dict[str, Any] = {name: tuple(line[name]) for name in _TUPLES}
    if "output_token_ids" in line:
        converted["output_token_ids"] = tuple(map(tuple, line["output_token_ids"]))
    converted["params"] = _params(line["params"])
    request = RecordedRequest(**{**line, **converted})
    given = (len(request.num_output_tokens), len(request.finish_reasons))
    if given != (request.params.n, request.params.n):
        raise InvalidConfigError(
            f"{given[0]} num_output_tokens and {given[1]} finish_reasons for n={request.params.n}; "
            "use one of each per sample"
        )
    request.item().params()
    return request


def _params(changed: dict[str, Any]) -> SamplingParams:
    bias = changed.get("logit_bias")
    try:
        if bias is not None:  # keys of JSON objects are strings
            changed = changed | {"logit_bias": {int(k): v for k, v in bias.items()}}
        return SamplingParams(**changed)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidConfigError(f"params={changed!r} are not allowed: {error}") from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def _is_priority(value: Any) -> bool:
    return _is_whole(value) and abs(value) <= MAX_PRIORITY


def _are(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(kind, value))


_OPTIONAL = {"conversation_id", "output_token_ids"}
_TUPLES = ("prompt_token_ids", "num_output_tokens", "finish_reasons")
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: isinstance(value, str), "a string"),
    "arrival_s": (_is_number, "a number"),
    "prompt_token_ids": (_are(_is_count), "a list of token ids"),
    "params": (lambda value: isinstance(value, dict), "an object"),
    "priority": (_is_priority, f"a whole number of {-MAX_PRIORITY} to {MAX_PRIORITY}"),
    "deadline_s": (lambda value: value is None or _is_number(value), "a number or null"),
    "num_output_tokens": (_are(_is_count), "a list of whole numbers of at least 0"),
    "finish_reasons": (_are(lambda value: value in get_args(FinishReason)), "a list of reasons"),
    "finished_s": (_is_number, "a number"),
    "conversation_id": (lambda value: value is None or isinstance(value, str), "a string or null"),
    "output_token_ids": (
        _are(lambda value: value == [] or _are(_is_count)(value)),
        "a list of lists of token ids",
    ),
}
