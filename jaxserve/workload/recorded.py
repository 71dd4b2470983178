"""Recorded traces: what a live run was asked and how long its answers were, to be asked again.

One line of JSON a request, written when it ends:

    {"id": "request-0", "arrival_s": 0.25, "prompt_token_ids": [5, 6, 7],
     "params": {"max_tokens": 256, "temperature": 0.7, "seed": 4}, "priority": 0,
     "deadline_s": null, "num_output_tokens": [31], "finish_reasons": ["stop"], "finished_s": 2.5,
     "conversation_id": null, "output_token_ids": [[8, 9, 2]]}

Times are seconds since the recording began. `params` are `SamplingParams` that differ from their
defaults, `max_tokens` and the seed that was drawn always among them. A request for n samples has n
lengths, n reasons and n lists of tokens; older traces lack the last two.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final, get_args

from jaxserve.core.errors import InvalidConfigError, InvalidSamplingParamsError
from jaxserve.core.request import Completion, FinishReason, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload.item import WorkloadItem

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """One line of a trace.

    Attributes:
      params: as they were asked for, with the seed that was used.
      num_output_tokens, finish_reasons: of each sample. One that was cancelled has the tokens that
        it had got, perhaps none.
      output_token_ids: of each sample; None in traces that lack them.
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
        """The same request with its answers forced to their lengths; arrivals count from `start_s`.

        What else could end an answer is left out: stop strings and tokens, `min_tokens`, and
        cancellation. An answer without a token gets one. The same model gives the same tokens,
        except where `min_tokens` had forbidden one.
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
        )


@final
class TraceWriter:
    """Appends a line for every request that ends, whole before the next; safe from any thread.

    Args:
      path: a new file, or an empty one.
      origin_s: the engine's clock at the beginning of the recording.

    A disk that fills up ends the recording with a logged error, and harms no request.

    Raises:
      InvalidConfigError: the file holds something already, or cannot be written.
    """

    def __init__(self, path: str | Path, *, origin_s: float):
        check_is_free(path)
        self._origin_s = origin_s
        self._file = Path(path).open("a", encoding="utf-8")
        self._one_writer = threading.Lock()

    def append(self, request: Request, completion: Completion) -> None:
        """Write the line of one request, whose samples have all ended."""

        def since(time_s: float | None) -> float | None:
            if time_s is None or not math.isfinite(time_s):
                return None
            return time_s - self._origin_s

        line = {
            "id": str(request.id),
            "arrival_s": since(request.arrival_s),
            "prompt_token_ids": request.prompt,
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
                _log.error("the recording %s ends here: %s", self._file.name, error)
                self.close()

    def close(self) -> None:
        with suppress(OSError):  # what could not be flushed was reported when it was written
            self._file.close()


def check_is_free(path: str | Path) -> None:
    """Refuse a file that a recording cannot have, before anything slow has happened.

    Raises:
      InvalidConfigError
    """
    path = Path(path)
    if path.is_dir() or (path.exists() and path.stat().st_size):
        raise InvalidConfigError(
            f"record={str(path)!r} holds something already; name another file, or remove it"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidConfigError(
            f"record={str(path)!r} cannot be written; name a file in a folder that can be"
        )


def read(path: str | Path) -> list[RecordedRequest]:
    """The requests of a trace, by arrival. A last line that was cut off is left out.

    Raises:
      InvalidConfigError: the file cannot be read, or a line is not one; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"cannot read the trace {path}: {error}; give a file written by record=..."
        ) from error
    lines = text.split("\n")
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                requests.append(_parse(json.loads(line)))
        except json.JSONDecodeError as error:
            if number == len(lines):
                _log.warning("%s line %d was cut off and is left out", path, number)
                continue
            raise InvalidConfigError(f"{path} line {number} is not JSON: {error}") from error
        except (InvalidConfigError, InvalidSamplingParamsError) as error:
            raise InvalidConfigError(f"{path} line {number}: {error}") from error
    return sorted(requests, key=lambda request: request.arrival_s)


def recorded_items(path: str | Path, num: int | None = None) -> list[WorkloadItem]:
    """The first `num` requests of a trace, all if None, as a workload; the first arrives at 0.

    Raises:
      InvalidConfigError: as `read`, or the trace holds fewer.
    """
    requests = read(path)
    if len(requests) < (num or 1):
        raise InvalidConfigError(
            f"{num or 1} requests were asked for, and {path} holds {len(requests)}; ask for fewer"
        )
    return [request.item(requests[0].arrival_s) for request in requests[:num]]


def _changed(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, and `max_tokens`."""
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    if params.logit_bias is not None:
        given["logit_bias"] = {int(k): float(v) for k, v in params.logit_bias.items()}
    default = SamplingParams()
    return {k: v for k, v in given.items() if k == "max_tokens" or v != getattr(default, k)}


def _plain(number: Any) -> int | float:
    """A number of NumPy or JAX as JSON can hold it."""
    return operator.index(number) if hasattr(number, "__index__") else float(number)


def _parse(line: object) -> RecordedRequest:
    known = {field.name for field in fields(RecordedRequest)}
    if not isinstance(line, dict) or not known - _OPTIONAL <= set(line) <= known:
        given = sorted(line) if isinstance(line, dict) else line
        raise InvalidConfigError(f"a line is an object of {sorted(known)}, not {given!r}")
    for name, (is_allowed, allowed) in _ALLOWED.items():
        if name in line and not is_allowed(line[name]):
            raise InvalidConfigError(f"{name}={line[name]!r} is not allowed; give {allowed}")
    converted: dict[str, Any] = {name: tuple(line[name]) for name in _TUPLES}
    if "output_token_ids" in line:
        converted["output_token_ids"] = tuple(map(tuple, line["output_token_ids"]))
    request = RecordedRequest(**{**line, **converted, "params": _params(line["params"])})
    given = (len(request.num_output_tokens), len(request.finish_reasons))
    if given != (request.params.n, request.params.n):
        raise InvalidConfigError(
            f"{given[0]} num_output_tokens and {given[1]} finish_reasons for n={request.params.n}; "
            "give one of each a sample"
        )
    request.item().params()
    return request


def _params(changed: dict[str, Any]) -> SamplingParams:
    bias = changed.get("logit_bias")
    try:
        if bias is not None:  # JSON object keys are always text
            changed = changed | {"logit_bias": {int(k): v for k, v in bias.items()}}
        return SamplingParams(**changed)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidConfigError(f"params={changed!r} are not allowed: {error}") from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _are(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(kind, value))


_OPTIONAL = {"conversation_id", "output_token_ids"}
_TUPLES = ("prompt_token_ids", "num_output_tokens", "finish_reasons")
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: isinstance(value, str), "a string"),
    "arrival_s": (_is_number, "a number"),
    "prompt_token_ids": (_are(_is_count), "a list of token ids"),
    "params": (lambda value: isinstance(value, dict), "an object"),
    "priority": (_is_whole, "a whole number"),
    "deadline_s": (lambda value: value is None or _is_number(value), "a number or null"),
    "num_output_tokens": (_are(_is_count), "a list of numbers from 0 on"),
    "finish_reasons": (_are(lambda value: value in get_args(FinishReason)), "a list of reasons"),
    "finished_s": (_is_number, "a number"),
    "conversation_id": (lambda value: value is None or isinstance(value, str), "a string or null"),
    "output_token_ids": (
        _are(lambda value: value == [] or _are(_is_count)(value)),
        "a list of lists of token ids",
    ),
}
