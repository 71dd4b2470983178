"""Public traces of serving, as they are downloaded: one reader for each format.

Every reader recognises its format from the beginning of the file, and yields `TraceRequest`s in the
file's order without holding the file. What each format leaves open is said at its reader.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import recorded, sharegpt

# The beginning of a file, by which its format is recognised.
_HEAD_BYTES = 1 << 16
_MAX_TOKENS = 1 << 31


@final
@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """A request of a public trace.

    Attributes:
      arrival_s: seconds on the trace's own clock; None if the format has no times.
      num_prompt_tokens, num_output_tokens: 0 where the trace has 0.
      session: the conversation that it is a turn of; "" for none.
      tenant: the client that sent it; "" if unknown.
      blocks: ids of the prompt's blocks of `block_tokens` tokens, of which the last may be shorter.
        Prompts with equal first ids begin with equal tokens. Empty if nothing is known.
      prompt: the token ids, if the trace has the prompt.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float | None = None
    session: str = ""
    tenant: str = ""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    prompt: tuple[int, ...] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What some readers need besides the file.

    Attributes:
      tokenizer: makes the tokenizer that counts the tokens of texts.
      seed: of the draws of a generator.
    """

    tokenizer: Callable[[], sharegpt.TextEncoder]
    seed: int = 0


class TraceReader(Protocol):
    """A format of traces.

    Attributes:
      name: what users call it.
      looks: how a file of the format looks, for messages.
    """

    name: ClassVar[str]
    looks: ClassVar[str]

    def recognises(self, path: Path, head: str) -> bool:
        """Return whether a file, or a folder with an empty head, has this format."""
        ...

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        """Yield the requests; raise InvalidConfigError with the line that is malformed."""
        ...


@final
class Azure:
    """Azure's LLM inference traces of 2023 and 2024, code and conversation.

    TIMESTAMP is the invocation, in UTC with seven fractional digits and no zone in 2023, and with
    six or none and "+00:00" in 2024. Lines end in CR LF in 2023. Neither says which requests belong
    to one conversation, and no prompt repeats another one's text.
    Source: Azure/AzurePublicDataset b469a11, AzureLLMInferenceDataset2023.md and ...2024.md.
    """

    name: ClassVar[str] = "Azure LLM 2023 or 2024"
    looks: ClassVar[str] = "TIMESTAMP,ContextTokens,GeneratedTokens"
    _columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def recognises(self, path: Path, head: str) -> bool:
        return _header(head) == list(self._columns)

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        for where, row in _rows(path):
            time, prompt, output = (row[name] for name in self._columns)
            try:
                at = datetime.fromisoformat(time)
            except ValueError as error:
                allowed = "a time such as 2024-05-10 00:00:01.5"
                raise _malformed(where, "TIMESTAMP", time, allowed) from error
            yield TraceRequest(
                arrival_s=(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(),
                num_prompt_tokens=_count(where, "ContextTokens", prompt),
                num_output_tokens=_count(where, "GeneratedTokens", output),
            )


@final
class BurstGPT:
    """BurstGPT, with and without failures; `Session ID` and `Elapsed time` came with release 1.2.

    Timestamp is seconds since midnight of the first day; the third file begins at 19,440,110.
    Failed requests have 0 response tokens, and nearly all of them 0 request tokens. API requests
    have an empty session. Requests to both models (ChatGPT, GPT-4) are kept.
    Source: HPMLL/BurstGPT e92f533, README.md.
    """

    name: ClassVar[str] = "BurstGPT"
    looks: ClassVar[str] = (
        "Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,..."
    )
    _columns = frozenset({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"})

    def recognises(self, path: Path, head: str) -> bool:
        return self._columns <= set(_header(head))

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        for where, row in _rows(path):
            yield TraceRequest(
                arrival_s=_seconds(where, "Timestamp", row["Timestamp"]),
                num_prompt_tokens=_count(where, "Request tokens", row["Request tokens"]),
                num_output_tokens=_count(where, "Response tokens", row["Response tokens"]),
                session=(row.get("Session ID") or "").strip(),
            )


@final
class Mooncake:
    """Mooncake's traces, which vLLM's `timed_trace` reads too.

    `timestamp` is in milliseconds. `hash_ids` are prefix hashes of blocks of 512 tokens, so an id
    stands for its block and all before it; the last block of a prompt may be shorter. Other files
    of this form have other blocks, so their size is the power of two from 16 to 1,024 that fits the
    first lines.
    Source: kvcache-ai/Mooncake 3b5a594, FAST25-release/README.md.
    """

    name: ClassVar[str] = "Mooncake"
    looks: ClassVar[str] = (
        '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}'
    )
    _fields = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})

    def recognises(self, path: Path, head: str) -> bool:
        return set(_first_object(head)) == self._fields

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        size = self._block_tokens(path)
        for where, line in _objects(path):
            missing = self._fields - set(line)
            if missing:
                raise _malformed(where, "the line", sorted(line), f"a line with {sorted(missing)}")
            num_prompt = _count(where, "input_length", line["input_length"])
            blocks = line["hash_ids"]
            if not isinstance(blocks, list) or len(blocks) != -(-num_prompt // size):
                raise _malformed(
                    where, "hash_ids", blocks, f"an id for each {size} of {num_prompt} tokens"
                )
            yield TraceRequest(
                arrival_s=_seconds(where, "timestamp", line["timestamp"]) / 1000,
                num_prompt_tokens=num_prompt,
                num_output_tokens=_count(where, "output_length", line["output_length"]),
                blocks=tuple(_count(where, "hash_ids", each) for each in blocks),
                block_tokens=size,
            )

    def _block_tokens(self, path: Path) -> int:
        first = [line for _, (_, line) in zip(range(100), _objects(path), strict=False)]
        lengths = [
            (line["input_length"], len(line["hash_ids"]))
            for line in first
            if isinstance(line.get("input_length"), int) and isinstance(line.get("hash_ids"), list)
        ]
        for size in (512, 1024, 256, 128, 64, 32, 16):
            if all(-(-num // size) == blocks for num, blocks in lengths):
                return size
        raise InvalidConfigError(
            f"{path}: the numbers of hash_ids fit blocks of no size from 16 to 1,024 tokens; pass "
            "a trace with an id for each block of a prompt"
        )


@final
class VllmPrompts:
    """vLLM's custom data set (`vllm bench serve --dataset-name custom`), which has no times.

    `prompt` is text or token ids, and `output_tokens` the length of the answer. The chat template
    that vLLM adds by default is not added.
    Source: vllm-project/vllm, vllm/benchmarks/datasets (0.14).
    """

    name: ClassVar[str] = "vLLM's custom data set"
    looks: ClassVar[str] = '{"prompt": "...", "output_tokens": n}'

    def recognises(self, path: Path, head: str) -> bool:
        return "prompt" in _first_object(head)

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        encode = None
        for where, line in _objects(path):
            prompt = line.get("prompt")
            if isinstance(prompt, str):
                encode = encode or options.tokenizer().encode
                tokens = tuple(encode(prompt))
            elif isinstance(prompt, list):
                tokens = tuple(_count(where, "prompt", each) for each in prompt)
            else:
                raise _malformed(where, "prompt", prompt, "a text or a list of token ids")
            if "output_tokens" not in line:
                raise _malformed(where, "the line", sorted(line), 'a line with "output_tokens"')
            num_output = _count(where, "output_tokens", line["output_tokens"])
            yield TraceRequest(
                num_prompt_tokens=len(tokens), num_output_tokens=num_output, prompt=tokens
            )


@final
class VllmResult:
    """A result of `vllm bench serve --save-result --save-detailed`: what that server was sent.

    `start_times` are seconds of a clock of its own; older versions have none.
    Source: vllm-project/vllm, vllm/benchmarks/serve.py (0.14).
    """

    name: ClassVar[str] = "a detailed result of vllm bench serve"
    looks: ClassVar[str] = (
        '{..., "input_lens": [...], "output_lens": [...], "start_times": [...], ...}'
    )

    def recognises(self, path: Path, head: str) -> bool:
        # One line, whose lists may begin beyond the head.
        is_one_line = head.startswith("{") and "\n" not in head.rstrip()
        return is_one_line and '"input_lens"' in path.read_text(encoding="utf-8")

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            columns = [given["input_lens"], given["output_lens"]]
            columns.append(given.get("start_times") or [None] * len(columns[0]))
            rows = list(zip(*columns, strict=True))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidConfigError(
                f"{path} is not a whole result ({type(error).__name__}: {error}); pass a file that "
                "vllm bench serve --save-result --save-detailed wrote"
            ) from error
        for number, (prompt, output, start) in enumerate(rows):
            where = f"{path} request {number}"
            yield TraceRequest(
                arrival_s=None if start is None else _seconds(where, "start_times", start),
                num_prompt_tokens=_count(where, "input_lens", prompt),
                num_output_tokens=_count(where, "output_lens", output),
            )


@final
class ShareGPT:
    """ShareGPT's JSON, as vLLM's benchmarks take it: first questions and answers, without times."""

    name: ClassVar[str] = "ShareGPT"
    looks: ClassVar[str] = '[{"id": ..., "conversations": [{"from": ..., "value": ...}]}]'

    def recognises(self, path: Path, head: str) -> bool:
        return head.startswith("[")

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        encode = options.tokenizer().encode
        for talk in sharegpt.read(path):
            if talk.first_turn is None:
                continue
            prompt, answer = (tuple(encode(text)) for text in talk.first_turn)
            if min(len(prompt), len(answer)) >= sharegpt.MIN_TOKENS:
                yield TraceRequest(
                    num_prompt_tokens=len(prompt), num_output_tokens=len(answer), prompt=prompt
                )


@final
class Recorded:
    """A trace of our own (`--record`); of a request for several samples the longest counts."""

    name: ClassVar[str] = "a trace of --record"
    looks: ClassVar[str] = '{"id": ..., "arrival_s": ..., "prompt_token_ids": [...], ...}'

    def recognises(self, path: Path, head: str) -> bool:
        return '"prompt_token_ids"' in head.partition("\n")[0]

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        for request in recorded.read(path):
            yield TraceRequest(
                arrival_s=request.arrival_s,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=max(request.num_output_tokens),
                prompt=request.prompt_token_ids,
            )


@final
class ServeGen:
    """A folder of ServeGen's clients, such as data/language/m-large, which is drawn from.

    `chunk-N-trace.csv` has no header: start of a window in seconds, requests a second, their
    coefficient of variation, Gamma or Weibull, and its shape and scale; a window without a pattern
    has no requests. `chunk-N-dataset.json` has, for windows of six hours, the probabilities of
    input and output lengths as texts of Python dictionaries. As in ServeGen's generator, the gaps
    of a window are drawn and then scaled to fill it; unlike there, the two lengths of a request are
    drawn independently of each other (the generator draws both from one random number). Lengths
    of a reasoning model's answers count with its reasoning. Images are not read.
    Source: alibaba/ServeGen f891d11, servegen/construct.py and clientpool.py.
    """

    name: ClassVar[str] = "ServeGen"
    looks: ClassVar[str] = "a folder of chunk-N-trace.csv and chunk-N-dataset.json"

    def recognises(self, path: Path, head: str) -> bool:
        return path.is_dir() and any(path.glob("chunk-*-trace.csv"))

    def read(self, path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
        clients = [
            _Client(file)
            for file in sorted(path.glob("chunk-*-trace.csv"), key=lambda file: file.name)
        ]
        rng = np.random.default_rng(options.seed)
        starts = sorted({start for client in clients for start in client.windows})
        for start, following in zip(starts, [*starts[1:], math.inf], strict=True):
            length_s = following - start if math.isfinite(following) else 600.0
            drawn = [request for each in clients for request in each.draw(start, length_s, rng)]
            yield from sorted(drawn, key=lambda request: request.arrival_s or 0.0)


_READERS: tuple[TraceReader, ...] = (
    *(Azure(), BurstGPT(), Mooncake(), ServeGen()),
    # The last of these reads the whole file to recognise it.
    *(Recorded(), VllmPrompts(), ShareGPT(), VllmResult()),
)


def reader_of(path: Path) -> TraceReader:
    """Return the reader of a file or folder.

    Raises:
      InvalidConfigError: it cannot be read, or has no known format.
    """
    try:
        head = ""
        if not path.is_dir():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
        for reader in _READERS:
            if reader.recognises(path, head):
                return reader
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"the trace {path} cannot be read: {error}; pass a file or folder of a trace, or chat, "
            "sessions or bursts, which are synthetic"
        ) from error
    known = "".join(f"\n  {each.name}: {each.looks}" for each in _READERS)
    begins = head.partition("\n")[0][:80]
    raise InvalidConfigError(
        f"the trace {path} begins with {begins!r}, which is none of the known formats; pass one of "
        f"{known}"
    )


# ServeGen's dictionaries: a number, a colon, and a probability.
_PAIR = re.compile(r"([\d.e+-]+)\s*:\s*([\d.e+-]+)")


@final
@dataclass(frozen=True)
class _Window:
    """How a ServeGen client's requests arrive in a window."""

    rate: float
    pattern: str
    shape: float


@final
class _Client:
    """A ServeGen client; a window of its lengths is parsed when it is first drawn from."""

    def __init__(self, trace: Path):
        self.name = trace.name.removesuffix("-trace.csv")
        self.windows = dict(_windows(trace))
        self._path = trace.with_name(f"{self.name}-dataset.json")
        self._texts: dict[int, Mapping[str, str]] | None = None
        self._lengths: dict[int, tuple[tuple[np.ndarray, np.ndarray], ...]] = {}

    def draw(
        self, start: float, length_s: float, rng: np.random.Generator
    ) -> Iterator[TraceRequest]:
        window = self.windows.get(int(start))
        if window is None or not window.rate:
            return
        num = math.ceil(window.rate * length_s)
        lengths = self._lengths_at(int(start))
        if not lengths:
            return
        draws = rng.weibull if window.pattern == "Weibull" else rng.standard_gamma
        gaps = draws(window.shape, num)
        # The last gap ends with the window, and no request follows it.
        arrivals = start + np.cumsum(gaps)[:-1] * (length_s / gaps.sum())
        prompts, outputs = (
            values[np.searchsorted(shares, rng.random(num - 1) * shares[-1])]
            for values, shares in lengths
        )
        for arrival_s, prompt, output in zip(arrivals, prompts, outputs, strict=True):
            yield TraceRequest(
                arrival_s=float(arrival_s),
                num_prompt_tokens=int(prompt),
                num_output_tokens=int(output),
                tenant=self.name,
            )

    def _lengths_at(self, start: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Return (lengths, cumulative shares) of inputs and outputs; empty if none are known."""
        if self._texts is None:
            try:
                read = json.loads(self._path.read_text(encoding="utf-8"))
                self._texts = {int(time): fields for time, fields in read.items()}
            except (OSError, ValueError, AttributeError) as error:
                raise InvalidConfigError(
                    f"{self._path} does not hold the lengths of ServeGen's client ({error}); pass "
                    "the whole folder"
                ) from error
        # As in ServeGen, windows without lengths do not count.
        times = [
            t for t in self._texts if t <= start and self._texts[t].get("input_tokens") != "{}"
        ]
        if not times:
            return ()
        time = max(times)
        if time not in self._lengths:
            fields = self._texts[time]
            pairs = [
                _PAIR.findall(fields.get(f"{side}_tokens", "")) for side in ("input", "output")
            ]
            self._lengths[time] = tuple(
                (
                    np.array([int(float(length)) for length, _ in each]),
                    np.cumsum([float(share) for _, share in each]),
                )
                for each in pairs
                if each
            )
        found = self._lengths[time]
        return found if len(found) == 2 else ()


def _windows(trace: Path) -> Iterator[tuple[int, _Window]]:
    with trace.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where, fields = f"{trace}:{number}", line.strip().split(",")
            if len(fields) != 6 or fields[3] not in ("", "Gamma", "Weibull"):
                raise _malformed(where, "the line", line, "time,rate,cv,Gamma|Weibull,shape,scale")
            time, rate, shape = (_seconds(where, "the line", fields[i]) for i in (0, 1, 4))
            yield int(time), _Window(rate if fields[3] else 0.0, fields[3], shape)


def _header(head: str) -> list[str]:
    return next(csv.reader([head.partition("\n")[0].rstrip("\r")]), [])


def _first_object(head: str) -> dict[str, Any]:
    try:
        found = json.loads(head.partition("\n")[0])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the fields of each row of a CSV file with a header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        header = next(rows)
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise _malformed(
                    f"{path}:{rows.line_num}", "the line", row, f"{len(header)} fields"
                )
            yield f"{path}:{rows.line_num}", dict(zip(header, row, strict=True))


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line of a file of JSON lines."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in zip(count(1), file, strict=False):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidConfigError(f"{path}:{number} is not JSON: {error}") from error
            if not isinstance(found, dict):
                raise _malformed(f"{path}:{number}", "the line", found, "an object")
            yield f"{path}:{number}", found


def _count(where: str, name: str, given: Any) -> int:
    try:
        number = int(given) if isinstance(given, str) else given
    except ValueError:
        number = None
    if type(number) is not int or not 0 <= number < _MAX_TOKENS:
        raise _malformed(where, name, given, "a whole number of at least 0")
    return number


def _seconds(where: str, name: str, given: Any) -> float:
    try:
        number = float(given)
    except (ValueError, TypeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise _malformed(where, name, given, "a number of at least 0")
    return number


def _malformed(where: str, name: str, given: Any, allowed: str) -> InvalidConfigError:
    shown = repr(given)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidConfigError(f"{where}: {name}={shown} is not allowed; use {allowed}")
