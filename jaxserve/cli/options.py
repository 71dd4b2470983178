"""Options that several commands share, and exit codes.

Exit codes: 0 done, 1 failure (of a request of a batch, memory, the cache), 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.core.errors import (
    CheckpointError,
    InvalidConfigError,
    InvalidRequestError,
    JaxserveError,
    JournalError,
    MissingExtraError,
    ModelError,
    OtherModelError,
    UnknownConversationError,
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


def _runtime(*names: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel=_RUNTIME)


def _processes(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=text, rich_help_panel=_PROCESSES, show_default=False)


def journal(text: str) -> typer.models.OptionInfo:
    """Return an option for the journal of conversations; `{default}` in `text` is its default."""
    where = "~/.local/share/jaxserve/conversations.sqlite (or in $XDG_DATA_HOME)"
    help = text.format(default=where)
    return typer.Option("--journal", envvar="JAXSERVE_JOURNAL", help=help, show_default=False)


MaxTokens = Annotated[int, _sampling("--max-tokens", "Maximum number of output tokens.")]
MinTokens = Annotated[int, _sampling("--min-tokens", "Minimum number of output tokens.")]
Temperature = Annotated[float, _sampling("--temperature", "0 is greedy.")]
TopK = Annotated[int, _sampling("--top-k", "Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[
    float, _sampling("--top-p", "Keep the fewest tokens of at least this total probability.")
]
MinP = Annotated[
    float, _sampling("--min-p", "Drop tokens less likely than this times the likeliest.")
]
RepetitionPenalty = Annotated[float, _sampling("--repetition-penalty", "1 for no penalty.")]
PresencePenalty = Annotated[float, _sampling("--presence-penalty", "0 for no penalty.")]
FrequencyPenalty = Annotated[float, _sampling("--frequency-penalty", "0 for no penalty.")]
Seed = Annotated[int | None, _sampling("--seed", "Seed; equal seeds give equal answers.")]
Stop = Annotated[
    list[str] | None, _sampling("--stop", "Text that ends an answer; may be given several times.")
]
IgnoreEos = Annotated[bool, _sampling("--ignore-eos", "Continue after the model's end token.")]

Model = Annotated[
    str,
    _runtime(
        "--model",
        "-m",
        text="A name (see `jaxserve models list`), org/name of the Hub, folder or GGUF file.",
    ),
]
Policy = Annotated[
    str, _runtime("--policy", text="Scheduling preset, such as auto, orca, exegpt_rra.")
]
LatencyBound = Annotated[
    float | None,
    _runtime(
        "--latency-bound",
        text="For --policy exegpt: seconds that a long answer (99th percentile) may take.",
    ),
]
FirstTokenBound = Annotated[
    float | None,
    _runtime(
        "--first-token-bound",
        text="For --policy exegpt: seconds that its first token may take.",
    ),
]
TokenBound = Annotated[
    float | None,
    _runtime(
        "--token-bound",
        text="For --policy exegpt: seconds that each later token may take, on average.",
    ),
]
Revision = Annotated[
    str | None, _runtime("--revision", text="Branch, tag or commit of a model of the Hub.")
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
Speculation = Annotated[
    str | None,
    _runtime(
        "--speculation",
        text="Propose next tokens: lookup (what followed the same tokens in the request or in "
        "past answers), or draft (--draft-model).",
    ),
]
DraftModel = Annotated[
    str | None,
    _runtime(
        "--draft-model",
        text="Model that proposes tokens with --speculation draft: named like --model.",
    ),
]
EndTokens = Annotated[
    list[str] | None,
    _runtime(
        "--end-token",
        text="Text of a token that ends an answer, beside those that the model declares, such as "
        "'<|end|>'; may be given several times.",
    ),
]
Deterministic = Annotated[
    bool,
    _runtime(
        "--deterministic",
        text="Refuse to serve where the bits of an answer could depend on other requests.",
    ),
]
Adapter = Annotated[
    list[str] | None,
    _runtime(
        "--adapter",
        text="A LoRA adapter as NAME=FOLDER; may be given several times. A server's clients name "
        "it as the model. Elsewhere, a single one is that of all prompts.",
    ),
]
AdapterDType = Annotated[
    str | None,
    _runtime(
        "--adapter-dtype",
        text="Dtype of adapters, bfloat16; by default that of the weights. Only with --adapter.",
    ),
]
HostMemory = Annotated[
    str | None,
    _runtime("--host-memory", text="Host memory for KV that leaves the device, e.g. 8GiB, or 0."),
]
DiskMemory = Annotated[
    str | None,
    _runtime("--disk-memory", text="Disk space for KV that leaves the host, e.g. 50GiB."),
]
DiskFolder = Annotated[
    Path | None,
    _runtime("--disk-folder", text="Folder for --disk-memory; one runtime at a time can use it."),
]
Predictor = Annotated[
    str | None,
    _runtime(
        "--predictor", text="Folder of a length predictor, for policies that use predictions."
    ),
]
Probe = Annotated[
    str | None,
    _runtime(
        "--probe", text="Folder of a probe of remaining lengths, for policies that use predictions."
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
Stages = Annotated[
    str | None,
    _runtime(
        "--stages",
        text="Cut the model into stages of LAYERSxDEVICES, e.g. 20x2,2*10x1 or just 20,10.",
    ),
]
Groups = Annotated[
    str | None,
    _runtime(
        "--groups",
        text="Devices for prompts / devices for answers, e.g. 1/4 or, with stages, 2/20x2,10x1; "
        "needs --policy exegpt, exegpt_waa_c or exegpt_waa_m.",
    ),
]
DataParallel = Annotated[
    int,
    _runtime("--data-parallel", text="Replicas in this process, each on its own devices."),
]
Replicas = Annotated[
    int,
    _runtime("--replicas", text="Replicas on Ray, each in its own process; see `Fleet`."),
]
Roles = Annotated[
    str | None,
    _runtime(
        "--roles",
        text="Replicas on Ray that compute prompts and others that compute answers, e.g. "
        "prefill=1,decode=2; in place of --replicas.",
    ),
]
Record = Annotated[
    Path | None,
    _runtime("--record", text="Record every request in this new file, for benchmarks to replay."),
]
Journal = Annotated[Path | None, journal("Journal of the conversations; by default {default}.")]
Coordinator = Annotated[
    str | None,
    _processes("--coordinator", "host:port of process 0. [default: JAXSERVE_COORDINATOR, SLURM]"),
]
NumProcesses = Annotated[
    int | None,
    _processes("--num-processes", "Number of processes. [default: JAXSERVE_NUM_PROCESSES, SLURM]"),
]
ProcessId = Annotated[
    int | None,
    _processes(
        "--process-id", "Number of this process, from 0. [default: JAXSERVE_PROCESS_ID, SLURM]"
    ),
]
Quiet = Annotated[bool, _runtime("--quiet", "-q", text="No progress bars.")]


def default_journal() -> Path:
    """Return the path of the journal that is used by default."""
    folder = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(folder) / "jaxserve" / "conversations.sqlite"


def made_journal() -> Path:
    """Return `default_journal`, after creating its folder.

    Raises:
      JournalError: the folder cannot be created.
    """
    path = default_journal()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"the folder {path.parent} cannot be created: {error}; pass --journal"
        ) from error
    return path


def describe(error: JaxserveError) -> str:
    """Return an error's type and message as text."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn typed errors and Ctrl-C into a message on stderr and an exit code, not a traceback."""
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
