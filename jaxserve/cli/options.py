"""The options of the command line, each declared once, what commands print, and exit codes.

A field of `SamplingOptions`, `ServiceOptions` or `ProcessOptions` is an option of every command
that takes the group (see `flat`). An option that other commands take too has an alias.

Exit codes: 0 done, 1 failure (of a request of a batch, memory, the cache), 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, final, get_type_hints

import typer

from jaxserve.cli.opening import adapters_of, open_service
from jaxserve.core.errors import (
    CheckpointError,
    InvalidConfigError,
    InvalidRequestError,
    JaxserveError,
    JournalError,
    MissingExtraError,
    ModelError,
    OtherModelError,
    ProcessGroupError,
    UnknownConversationError,
)
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.runtime import Service


Command = Callable[..., None]


def flat(*, omit: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator that replaces each dataclass parameter of a command by its fields.

    Typer reads the resulting signature, and the command gets the dataclasses. A field has the
    annotation of an option, and its default is the option's default. Fields in `omit` are not
    options of this command, and keep their defaults.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, tuple[Any, list[str]]] = {}
        shown: list[inspect.Parameter] = []
        unknown = set(omit)
        for name, parameter in inspect.signature(command).parameters.items():
            group = hints[name]
            if not dataclasses.is_dataclass(group):
                shown.append(_option(name, group, parameter.default))
                continue
            annotations = get_type_hints(group, include_extras=True)
            fields = [field for field in dataclasses.fields(group) if field.name not in omit]
            unknown -= {field.name for field in dataclasses.fields(group)}
            groups[name] = (group, [field.name for field in fields])
            shown += [_option(each.name, annotations[each.name], each.default) for each in fields]
        names = [parameter.name for parameter in shown]
        twice = {name for name in names if names.count(name) > 1}
        if unknown or twice:
            raise TypeError(
                f"{command.__name__}: {sorted(unknown)} to omit are not fields, and "
                f"{sorted(twice)} are options twice"
            )

        @functools.wraps(command)
        def flattened(**given: Any) -> None:
            made = {
                name: group(**{field: given.pop(field) for field in fields})
                for name, (group, fields) in groups.items()
            }
            command(**given, **made)

        cast(Any, flattened).__signature__ = inspect.Signature(shown)
        return flattened

    return decorate


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    given = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=given
    )


EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

DEFAULT_MODEL = "smollm2-135m"

_SAMPLING = "Sampling"
_RUNTIME = "Runtime"
_PROCESSES = "Several processes"


def _sampling(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=text, rich_help_panel=_SAMPLING)


def in_panel(panel: str, *names: str, text: str, **more: Any) -> Any:
    """Return an option that `--help` shows in a panel; `more` is for `typer.Option`."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_runtime = functools.partial(in_panel, _RUNTIME)


def _processes(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=text, rich_help_panel=_PROCESSES, show_default=False)


def journal(text: str) -> typer.models.OptionInfo:
    """Return an option for the journal of conversations; `{default}` in `text` is its default."""
    where = "~/.local/share/jaxserve/conversations.sqlite (or in $XDG_DATA_HOME)"
    help = text.format(default=where)
    return typer.Option("--journal", envvar="JAXSERVE_JOURNAL", help=help, show_default=False)


MaxTokens = Annotated[int, _sampling("--max-tokens", "Maximum number of output tokens.")]

Model = Annotated[
    str,
    _runtime(
        "--model",
        "-m",
        text="A name (see `jaxserve models list`), org/name of the Hub, folder or GGUF file.",
    ),
]
Load = Annotated[str, _runtime("--load", text="auto, or random for random weights.")]
DType = Annotated[str | None, _runtime("--dtype", text="dtype of weights and KV, e.g. bfloat16.")]
KvMemory = Annotated[str | None, _runtime("--kv-memory", text="Size of the KV pool, e.g. 2GiB.")]
KvDType = Annotated[
    str | None,
    _runtime(
        "--kv-dtype", text="dtype of the KV pool, if not that of --dtype: int8 or float8_e4m3fn."
    ),
]
Quantize = Annotated[
    str | None,
    _runtime("--quantize", text="Weights in fewer bits: bf16, int8, int4, fp8, w8a8, keep (GGUF)."),
]
QuantizeEmbeddings = Annotated[
    str | None,
    _runtime(
        "--quantize-embeddings",
        text="Embedding and head with --quantize: int8, int4 or none. [default: int8]",
    ),
]
MaxSlots = Annotated[
    int | None, _runtime("--max-slots", text="Maximum number of sequences that run at once.")
]
MaxContext = Annotated[
    int | None,
    _runtime("--max-context", text="Maximum number of tokens of prompt and answer together."),
]
TensorParallel = Annotated[
    int, _runtime("--tensor-parallel", text="Number of devices over which the model is split.")
]
Journal = Annotated[Path | None, journal("Journal of the conversations; by default {default}.")]
LogLevel = Literal["debug", "info", "warning", "error"]
Quiet = Annotated[bool, _runtime("--quiet", "-q", text="No progress bars.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, not a table.")]


def default_journal() -> Path:
    folder = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(folder) / "jaxserve" / "conversations.sqlite"


def made_journal() -> Path:
    """Return `default_journal`, after creating its folder."""
    path = default_journal()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"the folder {path.parent} cannot be created: {error}; pass --journal"
        ) from error
    return path


def describe(error: JaxserveError) -> str:
    return f"{type(error).__name__}: {error}"


def log_to_stderr(level: LogLevel) -> None:
    """Log what this package says, from this level on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    if level == "warning":  # as it is, which a program that calls a command may have changed
        return
    logging.getLogger("jaxserve").setLevel(level.upper())


@final
class EndsAtOnce(SystemExit):
    """The end of a process that does not wait for what still runs on the device."""


@contextmanager
def exit_codes(*, ends_at_once: bool = False) -> Iterator[None]:
    """Turn typed errors and Ctrl-C into a message on stderr and an exit code, not a traceback.

    With `ends_at_once`, Ctrl-C raises `EndsAtOnce`, since Python waits for the device as it ends.
    """
    try:
        yield
    except JaxserveError as error:
        typer.echo(describe(error), err=True)
        bad_input = (
            InvalidRequestError,
            InvalidConfigError,
            ModelError,
            MissingExtraError,
            OtherModelError,
            UnknownConversationError,
        )
        is_bad_input = isinstance(error, bad_input) and not isinstance(error, CheckpointError)
        raise typer.Exit(EXIT_BAD_INPUT if is_bad_input else EXIT_FAILED) from error
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        if ends_at_once:
            raise EndsAtOnce(EXIT_INTERRUPTED) from None
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the ValueErrors of the package `predictor` into typed errors."""
    try:
        yield
    except JaxserveError:
        raise
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error


def goodput_bounds_s(texts: Sequence[str]) -> dict[str, float]:
    """Parse bounds in milliseconds, such as "ttft:500,tpot:50", to seconds."""
    bounds_s: dict[str, float] = {}
    for text in (part for each in texts for part in each.split(",")):
        name, _, milliseconds = text.partition(":")
        try:
            bounds_s[name] = float(milliseconds) / 1000
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el") or not bounds_s[name] > 0:
            raise InvalidConfigError(
                f"--goodput {text!r} is not understood; pass bounds in milliseconds of ttft, tpot "
                "or e2el, such as ttft:500,tpot:50"
            )
    return bounds_s


def check_positive(**given: float | None) -> None:
    """Raise InvalidConfigError for an option that is given and not a finite number above 0."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidConfigError(f"--{name} {value:g} is not allowed; pass more than 0")


def show_wide(table: Table, least: int = 120) -> None:
    from rich.console import Console

    console = Console()
    console.width = max(console.width, least)
    console.print(table)


# Options for many requests at once, which one conversation in a terminal does not have.
OF_MANY_REQUESTS = ("max_slots", "data_parallel", "replicas", "roles")


@final
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of how tokens are chosen; fields of `SamplingParams`."""

    min_tokens: Annotated[int, _sampling("--min-tokens", "Minimum number of output tokens.")] = 0
    temperature: Annotated[float, _sampling("--temperature", "0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("--top-k", "Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[
        float, _sampling("--top-p", "Keep the fewest tokens of at least this total probability.")
    ] = 1.0
    min_p: Annotated[
        float, _sampling("--min-p", "Drop tokens less likely than this times the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[float, _sampling("--repetition-penalty", "1 for no penalty.")] = (
        1.0
    )
    presence_penalty: Annotated[float, _sampling("--presence-penalty", "0 for no penalty.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("--frequency-penalty", "0 for no penalty.")] = 0.0
    seed: Annotated[int | None, _sampling("--seed", "Seed; equal seeds give equal answers.")] = None
    stop: Annotated[
        list[str] | None,
        _sampling("--stop", "Text that ends an answer; may be given several times."),
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("--ignore-eos", "Continue after the model's end token.")
    ] = False
    max_thinking_tokens: Annotated[
        int | None,
        _sampling("--max-thinking-tokens", "The end of thinking is written after this many."),
    ] = None
    template_kwargs: Annotated[
        str | None,
        _sampling(
            "--template-kwargs",
            "Variables of the chat template as JSON, such as '{\"enable_thinking\": false}'.",
        ),
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        """Return the sampling parameters, with additional fields of the command."""
        fields: dict[str, Any] = {**vars(self), "stop": tuple(self.stop or ()), **more}
        fields["template_kwargs"] = parsed_kwargs(self.template_kwargs)
        return SamplingParams(
            **{name: value for name, value in fields.items() if value is not None}
        )


def parsed_kwargs(text: str | None) -> Any:
    """Return the variables of a chat template from their JSON; None without any."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(
            f"--template-kwargs {text:.80} is not JSON: {error}; pass an object such as "
            "'{\"enable_thinking\": false}'"
        ) from None


@final
@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of the service that a command opens; arguments of `open_service`."""

    policy: Annotated[
        str, _runtime("--policy", text="Scheduling preset, such as auto, orca, exegpt_rra.")
    ] = "auto"
    latency_bound: Annotated[
        float | None,
        _runtime(
            "--latency-bound",
            text="For --policy exegpt: seconds that a long answer (99th percentile) may take.",
        ),
    ] = None
    first_token_bound: Annotated[
        float | None,
        _runtime(
            "--first-token-bound",
            text="For --policy exegpt: seconds that its first token may take.",
        ),
    ] = None
    token_bound: Annotated[
        float | None,
        _runtime(
            "--token-bound",
            text="For --policy exegpt: seconds that each later token may take, on average.",
        ),
    ] = None
    revision: Annotated[
        str | None, _runtime("--revision", text="Branch, tag or commit of a model of the Hub.")
    ] = None
    load: Load = "auto"
    dtype: DType = None
    kv_memory: KvMemory = None
    kv_dtype: KvDType = None
    quantize: Quantize = None
    quantize_embeddings: QuantizeEmbeddings = None
    speculation: Annotated[
        str | None,
        _runtime(
            "--speculation",
            text="Propose next tokens: lookup (what followed the same tokens in the request or in "
            "past answers), or draft (--draft-model).",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        _runtime(
            "--draft-model",
            text="Model that proposes tokens with --speculation draft: named like --model.",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        _runtime(
            "--deterministic",
            text="Refuse to serve where the bits of an answer could depend on other requests.",
        ),
    ] = False
    graph_loops: Annotated[
        bool | None,
        _runtime(
            "--graph-loops/--no-graph-loops",
            text="Record decode loops in CUDA graphs, or not. [default: JAXSERVE_GRAPH_LOOPS, or "
            "if a test passes]",
        ),
    ] = None
    end_tokens: Annotated[
        list[str] | None,
        _runtime(
            "--end-token",
            text="Text of a token that ends an answer, besides those that the model declares, such "
            "as '<|end|>'; may be given several times.",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _runtime(
            "--chat-template",
            text="File of a Jinja template, or its source, in place of the model's own.",
        ),
    ] = None
    reranker: Annotated[
        str | None,
        _runtime(
            "--reranker",
            text="qwen3 for an original Qwen3-Reranker, which ranks by its answers yes and no.",
        ),
    ] = None
    adapter: Annotated[
        list[str] | None,
        _runtime(
            "--adapter",
            text="A LoRA adapter as NAME=FOLDER; may be given several times. A server's clients "
            "name it as the model. Elsewhere, a single one is that of all prompts.",
        ),
    ] = None
    adapter_dtype: Annotated[
        str | None,
        _runtime(
            "--adapter-dtype",
            text="Dtype of adapters, bfloat16; by default that of the weights. Only with "
            "--adapter.",
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        _runtime(
            "--host-memory", text="Host memory for KV that leaves the device, e.g. 8GiB, or 0."
        ),
    ] = None
    state_memory: Annotated[
        str | None,
        _runtime(
            "--state-memory",
            text="Memory for kept states of recurrent layers, e.g. 1GiB, or 0.",
        ),
    ] = None
    disk_memory: Annotated[
        str | None,
        _runtime("--disk-memory", text="Disk space for KV that leaves the host, e.g. 50GiB."),
    ] = None
    disk_folder: Annotated[
        Path | None,
        _runtime(
            "--disk-folder", text="Folder for --disk-memory; one runtime at a time can use it."
        ),
    ] = None
    predictor: Annotated[
        str | None,
        _runtime(
            "--predictor", text="Folder of a length predictor, for policies that use predictions."
        ),
    ] = None
    probe: Annotated[
        str | None,
        _runtime(
            "--probe",
            text="Folder of a probe of remaining lengths, for policies that use predictions.",
        ),
    ] = None
    max_slots: MaxSlots = None
    max_context: MaxContext = None
    tensor_parallel: TensorParallel = 1
    stages: Annotated[
        str | None,
        _runtime(
            "--stages",
            text="Cut the model into stages of LAYERSxDEVICES, e.g. 20x2,2*10x1 or just 20,10.",
        ),
    ] = None
    groups: Annotated[
        str | None,
        _runtime(
            "--groups",
            text="Devices for prompts / devices for answers, e.g. 1/4 or, with stages, "
            "2/20x2,10x1; needs --policy exegpt, exegpt_waa_c or exegpt_waa_m.",
        ),
    ] = None
    data_parallel: Annotated[
        int, _runtime("--data-parallel", text="Replicas in this process, each on its own devices.")
    ] = 1
    replicas: Annotated[
        int, _runtime("--replicas", text="Replicas on Ray, each in its own process; see `Fleet`.")
    ] = 1
    roles: Annotated[
        str | None,
        _runtime(
            "--roles",
            text="Replicas on Ray that compute prompts and others that compute answers, e.g. "
            "prefill=1,decode=2; in place of --replicas.",
        ),
    ] = None
    record: Annotated[
        Path | None,
        _runtime(
            "--record", text="Record every request in this new file, for benchmarks to replay."
        ),
    ] = None
    quiet: Quiet = False
    log_level: Annotated[
        LogLevel | None,
        _runtime(
            "--log-level", text="What is logged to stderr. [default: info for serve, else warning]"
        ),
    ] = None

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(adapters_of(self.adapter or ()))

    @property
    def only_adapter(self) -> str | None:
        """Name of the adapter, if there is exactly one."""
        return self.adapters[0] if len(self.adapters) == 1 else None

    @property
    def is_fleet(self) -> bool:
        return self.replicas != 1 or self.roles is not None

    def open(self, model: str, *, conversations: Path | None = None, **more: Any) -> Service:
        """Open the service; a process that does not lead serves the leader, and then exits.

        `conversations` is the journal; `more` are values of the command that override its options.
        """
        settings: dict[str, Any] = {**vars(self), "conversations": conversations, **more}
        log_to_stderr(settings.pop("log_level") or "warning")
        return open_service(model, **settings)


@final
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Options of a command that several processes run together."""

    coordinator: Annotated[
        str | None,
        _processes(
            "--coordinator", "host:port of process 0. [default: JAXSERVE_COORDINATOR, SLURM]"
        ),
    ] = None
    num_processes: Annotated[
        int | None,
        _processes(
            "--num-processes", "Number of processes. [default: JAXSERVE_NUM_PROCESSES, SLURM]"
        ),
    ] = None
    process_id: Annotated[
        int | None,
        _processes(
            "--process-id", "Number of this process, from 0. [default: JAXSERVE_PROCESS_ID, SLURM]"
        ),
    ] = None

    start_timeout: Annotated[
        int | None,
        _processes(
            "--start-timeout",
            "Seconds until all processes have joined. [default: JAXSERVE_START_TIMEOUT, 120]",
        ),
    ] = None
    heartbeat_timeout: Annotated[
        int | None,
        _processes(
            "--heartbeat-timeout",
            "Seconds until JAX gives a silent process up. [default: "
            "JAXSERVE_HEARTBEAT_TIMEOUT, 25]",
        ),
    ] = None
    step_timeout: Annotated[
        int | None,
        _processes(
            "--step-timeout",
            "Seconds until a step counts as hung, and all processes end. [default: "
            "JAXSERVE_STEP_TIMEOUT, 600]",
        ),
    ] = None

    def join(self) -> bool:
        """Connect the processes, if there are several; return whether this process leads."""
        from jaxserve import sharding

        try:
            group = sharding.join(
                self.coordinator,
                self.num_processes,
                self.process_id,
                timeout_s=self.start_timeout,
                heartbeat_timeout_s=self.heartbeat_timeout,
                step_timeout_s=self.step_timeout,
            )
        except ValueError as error:
            raise InvalidConfigError(str(error)) from error
        except sharding.JoinError as error:
            raise ProcessGroupError(str(error)) from error
        return group is None or group.is_leader
