"""`jaxserve bench`: throughput and latencies of a server, or of a runtime in this process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, final

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.generate import from_jsonl, opened
from jaxserve.cli.options import ProcessOptions, ServiceOptions, flat
from jaxserve.core.errors import InvalidConfigError, JaxserveError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.engine.answers import Piece
    from jaxserve.models.tokenizer import Tokenizer
    from jaxserve.runtime import Service
    from jaxserve.workload import WorkloadItem
    from jaxserve.workload.load import StreamClient, TimedAnswer

if sys.platform != "win32":
    import resource

_LOAD, _DATA, _RESULTS = "Load", "Requests", "Results"
_KEY_VARIABLE = "OPENAI_API_KEY"
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_NUM_REQUESTS = 32
# The beginning of a file, which says what it is; that of ShareGPT is one line.
_HEAD_CHARACTERS = 4096
# Seconds for the list of a server's models.
_MODELS_S = 30.0
# Token ids that every usual vocabulary has.
_SMALL_VOCABULARY = 1000
# Options of a service that concern what is printed.
_OF_OUTPUT = ("quiet", "log_level")
_LATENCIES = {
    "time_to_first_token_s": "Time to first token",
    "time_per_output_token_s": "Time per output token",
    "inter_token_latency_s": "Inter-token latency",
    "latency_s": "End-to-end latency",
}


@final
@dataclass(frozen=True)
class _Job:
    """A request of the load.

    Attributes:
      prompt: text, token ids or messages.
      arrival_s: seconds after the first one, as recorded.
    """

    prompt: Any
    params: SamplingParams
    arrival_s: float = 0.0


class _Measured(Protocol):
    """What is measured.

    Attributes:
      described: fields of the report.
      gets_text: whether prompts of token ids are sent as text.
    """

    described: dict[str, Any]
    gets_text: bool

    @property
    def vocab_size(self) -> int:
        """Token ids of random prompts are below it."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, or raise InvalidConfigError."""
        ...

    def request(self, job: _Job) -> Any:
        """Return what `send` takes, made before the measurement."""
        ...

    async def send(self, request: Any, answer: TimedAnswer) -> None: ...


@final
@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The requests that the options ask for."""

    endpoint: Annotated[
        Literal["/v1/completions", "/v1/chat/completions"] | None,
        opt.in_panel(
            _LOAD,
            "--endpoint",
            text="Where prompts go. [default: /v1/completions; messages go to the chat]",
        ),
    ] = None
    dataset: Annotated[
        str,
        opt.in_panel(
            _DATA,
            "--dataset",
            "--dataset-path",
            text="random, sharegpt (fetched once), or a file: ShareGPT's JSON, a trace of "
            "--record, or JSON lines with prompt or messages.",
        ),
    ] = "random"
    num_requests: Annotated[
        int | None,
        opt.in_panel(
            _DATA,
            "--num-requests",
            "--num-prompts",
            text=f"Number of requests. [default: {_NUM_REQUESTS}; of a trace and JSON lines, all]",
        ),
    ] = None
    input_len: Annotated[
        int,
        opt.in_panel(
            _DATA,
            "--random-input-len",
            "--prompt-tokens",
            text="random: tokens of each prompt.",
        ),
    ] = 64
    output_len: Annotated[
        int,
        opt.in_panel(
            _DATA,
            "--random-output-len",
            "--output-tokens",
            text="random: tokens of each answer.",
        ),
    ] = 64
    range_ratio: Annotated[
        float,
        opt.in_panel(
            _DATA,
            "--random-range-ratio",
            text="random: lengths are uniform between 1 - this and 1 + this times those.",
        ),
    ] = 0.0
    max_tokens: Annotated[
        int,
        opt.in_panel(
            _DATA,
            "--max-tokens",
            text="Longest answer of ShareGPT, and of JSON lines that name none.",
        ),
    ] = 256
    ignore_eos: Annotated[
        bool,
        opt.in_panel(
            _DATA,
            "--ignore-eos/--no-ignore-eos",
            text="Make answers as long as the data set says. Servers that refuse the field "
            "ignore_eos, such as OpenAI's, need --no-ignore-eos; their answers may be shorter.",
        ),
    ] = True
    temperature: Annotated[float, opt.in_panel(_DATA, "--temperature", text="0 is greedy.")] = 0.0
    seed: Annotated[
        int, opt.in_panel(_DATA, "--seed", text="Seed of the requests and of the arrivals.")
    ] = 0

    def check(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise InvalidConfigError(
                f"--num-requests {self.num_requests} is not allowed; pass at least 1"
            )
        if not 0 <= self.range_ratio < 1:
            raise InvalidConfigError(
                f"--random-range-ratio {self.range_ratio:g} is not allowed; pass 0 to below 1"
            )

    def jobs(self, target: _Measured) -> list[_Job]:
        found = [
            replace(job, prompt=self._as_sent(job.prompt, target)) for job in self._drawn(target)
        ]
        if not found:
            raise InvalidConfigError(f"{self.dataset} holds no requests; put one on each line")
        return found

    def _drawn(self, target: _Measured) -> Sequence[_Job]:
        from jaxserve.workload import recorded, sharegpt

        num = self.num_requests or _NUM_REQUESTS
        if self.dataset == "random":
            return self._random(num, target.vocab_size)
        path = None if self.dataset == "sharegpt" else Path(self.dataset)
        kind = "sharegpt" if path is None else _kind(path)
        if kind == "trace":
            return [
                self._job(item) for item in recorded.recorded_items(self.dataset, self.num_requests)
            ]
        if path is not None and kind == "lines":
            params = self._params(self.max_tokens, has_length=False)
            return [_Job(each.prompt, each.params) for each in from_jsonl(path, params)][
                : self.num_requests
            ]
        tokenizer = target.tokenizer()
        items = sharegpt.sample(
            num, self.seed, tokenizer=tokenizer, max_output_tokens=self.max_tokens, path=path
        )
        # As text, which a server reads with its own tokenizer.
        return [
            replace(self._job(item), prompt=tokenizer.decode(item.prompt_token_ids))
            for item in items
        ]

    def _random(self, num: int, vocab_size: int) -> list[_Job]:
        import numpy as np

        rng = np.random.default_rng(self.seed)
        jobs = []
        for _ in range(num):
            num_input, num_output = (
                int(rng.integers(low, high + 1))
                for low, high in map(self._range, (self.input_len, self.output_len))
            )
            prompt = rng.integers(0, vocab_size, num_input).tolist()
            jobs.append(_Job(prompt, self._params(num_output)))
        return jobs

    def _range(self, length: int) -> tuple[int, int]:
        if length < 1:
            raise InvalidConfigError(f"a length of {length} tokens is not allowed; pass at least 1")
        spread = self.range_ratio
        return max(1, math.ceil(length * (1 - spread))), math.floor(length * (1 + spread))

    def _job(self, item: WorkloadItem) -> _Job:
        params = self._params(item.num_output_tokens)
        return _Job(list(item.prompt_token_ids), params, item.arrival_s)

    def _params(self, max_tokens: int, *, has_length: bool = True) -> SamplingParams:
        ignore_eos = self.ignore_eos and has_length
        return SamplingParams(
            max_tokens=max_tokens, temperature=self.temperature, ignore_eos=ignore_eos
        )

    def _as_sent(self, prompt: Any, target: _Measured) -> Any:
        """Return a prompt in the form of the endpoint that was asked for."""
        if _is_chat(prompt):
            if self.endpoint == _COMPLETIONS:
                raise InvalidConfigError(
                    f"{self.dataset} has messages, and {_COMPLETIONS} takes none; omit --endpoint"
                )
            return prompt
        is_chat = self.endpoint == _CHAT
        if not isinstance(prompt, str) and (is_chat or target.gets_text):
            prompt = target.tokenizer().decode(prompt)
        return [{"role": "user", "content": prompt}] if is_chat else prompt


@flat()
def bench(
    *,
    url: Annotated[
        str | None,
        opt.in_panel(
            _LOAD,
            "--url",
            "--base-url",
            text="A server with OpenAI's API, such as http://127.0.0.1:8000. Without it, the model "
            f"is loaded here. Its key, if it wants one, is ${_KEY_VARIABLE}.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        opt.in_panel(
            _LOAD,
            "--model",
            "-m",
            text="The model's name on the server, by default its first one; without --url a name, "
            f"folder or file as for `jaxserve generate`, by default {opt.DEFAULT_MODEL}.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        opt.in_panel(
            _LOAD,
            "--rate",
            "--request-rate",
            text="Requests a second on average, as Poisson arrivals. [default: all at once; a "
            "trace as it was recorded]",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        opt.in_panel(
            _LOAD,
            "--concurrency",
            "--max-concurrency",
            text="Most requests that are open at once; the next one begins when one ends.",
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        opt.in_panel(
            _LOAD,
            "--num-warmups",
            text="Send that many of the first requests before, unmeasured; each must succeed.",
        ),
    ] = 1,
    asked: _Asked,
    tokenizer: Annotated[
        str | None,
        opt.in_panel(
            _DATA,
            "--tokenizer",
            text="Name or folder of the tokenizer for ShareGPT and for prompts of token ids, which "
            "are then sent as text. [default: that of --model; completions get ids]",
        ),
    ] = None,
    metric_percentiles: Annotated[
        str, opt.in_panel(_RESULTS, "--metric-percentiles", text="Percentiles of each latency.")
    ] = "50,90,99",
    goodput: Annotated[
        list[str] | None,
        opt.in_panel(
            _RESULTS,
            "--goodput",
            text="Bounds in milliseconds, such as ttft:500,tpot:50,e2el:8000; the goodput is the "
            "answers within all.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        opt.in_panel(
            _RESULTS,
            "--output",
            "-o",
            text="Write the figures and each request's times to this JSON file, too.",
        ),
    ] = None,
    as_json: opt.AsJson = False,
    service_options: ServiceOptions,
    processes: ProcessOptions,
) -> None:
    """Measure throughput and latencies under a load, of any server or of a model loaded here.

    Ctrl-C prints what was measured so far. Latencies are those that the client sees, with the
    opening of each request's connection.
    """
    with opt.exit_codes():
        asked.check()
        percentiles = _percentiles(metric_percentiles)
        bounds_s = opt.goodput_bounds_s(goodput or ())
        opt.check_positive(rate=rate, concurrency=concurrency)
        if url is None:
            if tokenizer is not None:
                raise InvalidConfigError("--tokenizer is for --url: the model here has its own")
            processes.join()
        with (
            nullcontext() if output is None else opened(output) as sink,
            _runtime(model or opt.DEFAULT_MODEL, service_options)
            if url is None
            else _server(url, model, tokenizer, service_options, processes) as target,
        ):
            jobs = asked.jobs(target)
            load = _Load(
                target, jobs, _arrivals_s(jobs, rate, concurrency, asked.seed), concurrency
            )
            load.warm_up(num_warmups)
            is_interrupted = load.run(progress=not service_options.quiet)
            report: dict[str, Any] = {
                **target.described,
                "dataset": asked.dataset,
                "seed": asked.seed,
                "rate": rate,
                "concurrency": concurrency,
                **load.figures(percentiles, bounds_s),
            }
            if sink is not None:
                json.dump({**report, "requests": load.records()}, sink)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        opt.show_wide(_table(report))
    for error, count in report["errors"].items():
        typer.echo(f"{count} request(s) failed: {error}", err=True)
    if is_interrupted:
        raise typer.Exit(opt.EXIT_INTERRUPTED)
    if report["num_failed"]:
        raise typer.Exit(opt.EXIT_FAILED)


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)


def _kind(path: Path) -> Literal["sharegpt", "trace", "lines"]:
    """Return what a file is, by its beginning."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD_CHARACTERS).lstrip()
    except OSError as error:
        raise InvalidConfigError(
            f"--dataset {path} cannot be read: {error}; pass random, sharegpt or a file"
        ) from error
    if head.startswith("["):
        return "sharegpt"
    return "trace" if '"prompt_token_ids"' in head.partition("\n")[0] else "lines"


def _arrivals_s(
    jobs: Sequence[_Job], rate: float | None, concurrency: int | None, seed: int
) -> list[float]:
    from jaxserve.workload.items import arrival_times

    if rate is None:
        return [0.0 if concurrency else job.arrival_s for job in jobs]
    return arrival_times(len(jobs), f"poisson:{rate}", seed)


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= each <= 100 for each in found):
        raise InvalidConfigError(
            f"--metric-percentiles {text!r} is not allowed; pass numbers of 0 to 100, such as 50,99"
        )
    return found


@final
class _Load:
    """The requests of a measurement, and their answers so far."""

    def __init__(
        self,
        target: _Measured,
        jobs: Sequence[_Job],
        arrivals_s: Sequence[float],
        concurrency: int | None,
    ):
        from jaxserve.workload.load import unanswered

        self._send = target.send
        self._requests = [target.request(job) for job in jobs]
        self._arrivals_s = arrivals_s
        self._concurrency = concurrency
        self._answers = unanswered(len(jobs))
        self._begun_s = self._ended_s = 0.0

    def warm_up(self, num: int) -> None:
        """Send the first requests one after the other; raise JaxserveError if one fails."""
        from jaxserve.workload.load import send_all, unanswered

        for request in self._requests[: max(0, num)]:
            (answer,) = answers = unanswered(1)
            asyncio.run(send_all(self._send, [request], [0.0], answers))
            if answer.error:
                raise JaxserveError(
                    f"a request before the measurement failed: {answer.error}; mend the options "
                    "(a server that takes no token ids needs --tokenizer, and one that refuses "
                    "ignore_eos --no-ignore-eos), or see the server's log"
                )

    def run(self, *, progress: bool) -> bool:
        """Send all requests; return whether Ctrl-C ended this early."""
        from tqdm import tqdm

        from jaxserve.workload.load import send_all

        num, begun_s = len(self._requests), time.perf_counter()
        is_interrupted = False
        with tqdm(
            total=num, desc="measuring", unit="request", leave=False, delay=2, disable=not progress
        ) as bar:
            try:
                asyncio.run(
                    send_all(
                        self._send,
                        self._requests,
                        self._arrivals_s,
                        self._answers,
                        max_concurrency=self._concurrency,
                        on_end=bar.update,
                    )
                )
            except KeyboardInterrupt:
                is_interrupted = True
        self._begun_s = min((each.at_s for each in self._answers if each.at_s), default=begun_s)
        ends_s = [time.perf_counter()] if is_interrupted else []
        self._ended_s = max([*ends_s, *(a.at_s + a.end_s for a in self._answers)])
        return is_interrupted

    def figures(self, percentiles: Sequence[float], bounds_s: dict[str, float]) -> dict[str, Any]:
        from jaxserve.workload.load import summarise_answers

        wall_s = self._ended_s - self._begun_s
        return summarise_answers(self._answers, wall_s, percentiles=percentiles, bounds_s=bounds_s)

    def records(self) -> list[dict[str, Any]]:
        """Return the times of each request that has ended."""
        return [
            {
                "start_s": answer.at_s - self._begun_s,
                "time_to_first_token_s": answer.times_s[0] if answer.times_s else None,
                "latency_s": answer.end_s,
                "prompt_tokens": answer.num_prompt_tokens,
                "output_tokens": answer.num_tokens,
                "error": answer.error or None,
            }
            for answer in self._answers
            if answer.end_s
        ]


@contextmanager
def _runtime(model: str, service_options: ServiceOptions) -> Iterator[_Measured]:
    started_s = time.perf_counter()
    with service_options.open(model) as service:
        described = {
            "model": model,
            "policy": service_options.policy,
            "startup_s": time.perf_counter() - started_s,
        }
        yield _RuntimeTarget(service, described, service_options.only_adapter)


@final
class _RuntimeTarget:
    """A service in this process."""

    gets_text = False

    def __init__(self, service: Service, described: dict[str, Any], adapter: str | None):
        self._service = service
        self._adapter = adapter
        self.described = described

    @property
    def vocab_size(self) -> int:
        return self._service.vocab_size

    def tokenizer(self) -> Tokenizer:
        if self._service.tokenizer is None:
            raise InvalidConfigError("the model has no tokenizer; use --dataset random or a trace")
        return self._service.tokenizer

    def request(self, job: _Job) -> _Job:
        return replace(job, params=replace(job.params, adapter=self._adapter))

    async def send(self, request: _Job, answer: TimedAnswer) -> None:
        def take(piece: Piece) -> None:
            if piece.token_ids:
                answer.note_tokens(len(piece.token_ids))

        answer.note_sent()
        try:
            pending = self._service.submit(request.prompt, request.params, on_piece=take)
            try:
                completion = await pending.aresult()
            except asyncio.CancelledError:
                pending.cancel()
                raise
        except JaxserveError as error:
            answer.fail(opt.describe(error))
            return
        answer.note_prompt(len(completion.prompt_token_ids))
        if completion.error is not None:
            answer.fail(opt.describe(completion.error))
        elif not answer.times_s:
            answer.fail("the answer has no tokens")


def _server(
    url: str,
    model: str | None,
    tokenizer: str | None,
    service_options: ServiceOptions,
    processes: ProcessOptions,
) -> AbstractContextManager[_Measured]:
    given = [
        f"--{field.name.replace('_', '-')}"
        for group in (service_options, processes)
        for field in fields(group)
        if field.name not in _OF_OUTPUT and getattr(group, field.name) != field.default
    ]
    if given:
        raise InvalidConfigError(
            f"{', '.join(given)} is for a model that is loaded here, and --url names a server; "
            "omit one of them"
        )
    _allow_connections()
    address = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(_KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return nullcontext(
        _ServerTarget(address, model or _first_model(address, headers), tokenizer, headers)
    )


def _allow_connections() -> None:
    """Raise the process's limit of open files, of which each open request is one, to its most."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _first_model(url: str, headers: dict[str, str]) -> str:
    """Return the first model of a server; raise InvalidConfigError if it names none."""
    import urllib.request

    try:
        asked = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(asked, timeout=_MODELS_S) as answer:
            if models := json.load(answer)["data"]:
                return str(models[0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidConfigError(
            f"{url}/v1/models cannot be read: {error}; start the server, or pass --model"
        ) from error
    raise InvalidConfigError(f"{url}/v1/models lists no model; pass --model")


@final
class _ServerTarget:
    """A server with OpenAI's API; completions get text or token ids, chats messages."""

    def __init__(self, url: str, model: str, tokenizer: str | None, headers: dict[str, str]):
        from jaxserve.workload.load import StreamClient

        self._model = model
        self._tokenizer_name = tokenizer
        self._tokenizer: Tokenizer | None = None
        self.gets_text = tokenizer is not None
        self._chat = StreamClient(url + _CHAT, headers)
        self._completions = StreamClient(url + _COMPLETIONS, headers)
        self.described = {"url": url, "model": model}

    @property
    def vocab_size(self) -> int:
        return self.tokenizer().vocab_size if self._tokenizer_name else _SMALL_VOCABULARY

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            from jaxserve.models.store import load_tokenizer

            name = self._tokenizer_name or self._model
            self._tokenizer = load_tokenizer(name)
            if self._tokenizer is None:
                raise InvalidConfigError(f"{name} has no tokenizer; pass --tokenizer")
        return self._tokenizer

    def request(self, job: _Job) -> tuple[StreamClient, bytes]:
        is_chat, params = _is_chat(job.prompt), job.params
        body = {
            "model": self._model,
            "messages" if is_chat else "prompt": job.prompt,
            "max_completion_tokens" if is_chat else "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if params.ignore_eos else {}),
        }
        return self._chat if is_chat else self._completions, json.dumps(body).encode()

    async def send(self, request: tuple[StreamClient, bytes], answer: TimedAnswer) -> None:
        client, body = request
        await client.send(body, answer)


def _table(report: dict[str, Any]) -> Table:
    """Return the counts and rates, and the latencies in milliseconds."""
    from rich.table import Table

    names = next((list(each) for name in _LATENCIES if (each := report[name])), [])
    table = Table(
        title=f"{report['model']}: {report['num_requests']} requests", title_justify="left"
    )
    table.add_column("")
    for name in names or ["mean"]:
        table.add_column(name, justify="right")
    for name, title in _LATENCIES.items():
        each = report[name]
        if each is not None:
            table.add_row(f"{title} (ms)", *(f"{1000 * each[key]:,.2f}" for key in names))
    table.add_section()
    counts = {
        "Completed": f"{report['num_completed']:,}",
        "Failed": f"{report['num_failed']:,}",
        "Not ended": f"{report['num_unfinished']:,}",
        "Seconds": f"{report['wall_s']:,.2f}",
        "Prompt tokens": "-" if report["prompt_tokens"] is None else f"{report['prompt_tokens']:,}",
        "Output tokens": f"{report['output_tokens']:,}",
        "Requests per second": f"{report['requests_per_s']:,.2f}",
        "Output tokens per second": f"{report['output_tokens_per_s']:,.2f}",
    }
    if "goodput" in report:
        within = report["goodput"]
        bounds = ", ".join(f"{name} {1000 * s:g} ms" for name, s in within["bounds_s"].items())
        told = f"{within['requests_per_s']:,.2f} ({within['share']:.0%})"
        counts[f"Goodput, requests per second ({bounds})"] = told
    for name, value in counts.items():
        table.add_row(name, value)
    return table
