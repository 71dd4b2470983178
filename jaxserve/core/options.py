"""The options of a runtime and of its journal, validated before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, TypedDict, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import parse_bytes
from jaxserve.core.suggestions import OPTIONS_ELSEWHERE, explain_unknown

# Dtypes of quantized pages, which have one scale per token and head.
KV_DTYPES = ("int8", "float8_e4m3fn")

DTYPES = ("float32", "bfloat16", "float16")
_ALL_KV_DTYPES = (*KV_DTYPES, *DTYPES)
# Other names of dtypes, as other engines have them.
_DTYPE_NAMES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}
_KV_DTYPE_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "bf16": "bfloat16"}

# Formats of weights, and of the embedding and the head.
QUANTIZE = ("bf16", "int8", "int4", "fp8", "w8a8", "keep")
QUANTIZE_EMBEDDINGS = ("int8", "int4", "none")

# Ways in which a model of tokens ranks texts.
RERANKERS = ("qwen3",)

# Sources of proposals for the next tokens.
SPECULATIONS = ("lookup", "draft")

# Defaults of `num_speculative_tokens` and `max_adapter_rank`.
_NUM_SPECULATIVE_TOKENS, _MAX_ADAPTER_RANK = 8, 16

# Lowest and highest values of the whole numbers. If arrays or counters of the device depend on a
# number, its highest value is above any use and keeps an absurd one from taking all memory.
_RANGES = {
    "max_slots": (1, 1 << 16),
    "max_waiting": (1, math.inf),
    "max_context": (1, math.inf),
    "max_step_tokens": (1, 1 << 20),
    "max_decode_iterations": (1, 1 << 16),
    "num_speculative_tokens": (1, 1 << 12),
    "page_size": (1, math.inf),
    "max_adapters": (0, 1 << 16),
    "max_adapter_rank": (1, 1 << 16),
    "seed": (-math.inf, math.inf),
}

# When executables are compiled.
WARMUPS = (True, False, "full", "background", "one_request")

# When pages are copied back from the host.
RESTORES = ("on_admission", "prefetch", "per_layer", "both")


def parse_dtype(dtype: Any) -> str | None:
    """Return the name of a model's dtype, one of `DTYPES`; None for None and "auto".

    Raises:
      InvalidConfigError: it is another one.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    given = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype))
    name = _DTYPE_NAMES.get(given, given)
    if name not in DTYPES:
        raise InvalidConfigError(
            f"dtype={dtype!r} is not allowed; give one of {DTYPES}, or omit it for the platform's"
        )
    return name


@final
@dataclass(frozen=True, kw_only=True)
class JournalLimits:
    """The limits of a journal. Beyond them, the least recently used conversations are dropped.

    Dropping frees an eighth of a limit at once, since erasing rewrites the file. A conversation
    that is being answered, and the one just written, are never dropped.

    Attributes:
      max_conversations: maximum number of conversations.
      max_bytes: maximum size of the journal's file or memory, in bytes or as "256MiB". A token of
        English takes about 9 bytes, a turn about 200.
      max_age_s: maximum time since a conversation's last turn; None for no limit. It is checked
        when the journal is opened and at some of the writes.

    Raises:
      InvalidConfigError: a limit is out of range.
    """

    max_conversations: int = 10_000
    max_bytes: int | str = "256MiB"
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_conversations, int) or self.max_conversations < 1:
            raise InvalidConfigError(
                f"max_conversations={self.max_conversations!r} is not allowed; pass a whole number "
                "of at least 1"
            )
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes))
        age_s = self.max_age_s
        if age_s is not None and not (isinstance(age_s, int | float) and 0 < age_s < math.inf):
            raise InvalidConfigError(
                f"max_age_s={age_s!r} is not allowed; pass seconds above 0, or None"
            )

    @property
    def num_bytes(self) -> int:
        return int(self.max_bytes)


class RuntimeKeywords(TypedDict, total=False):
    """The fields of `RuntimeOptions` as keyword arguments, which editors complete."""

    policy: Any
    latency_bound: float | None
    first_token_bound: float | None
    token_bound: float | None
    kv_memory: int | str | None
    kv_dtype: str | None
    quantize: str | None
    quantize_embeddings: str | None
    host_memory: int | str | None
    state_memory: int | str | None
    restore: str | None
    disk_memory: int | str | None
    disk_folder: str | Path | None
    predictor: Any
    probe: Any
    learns: bool
    max_slots: int | None
    max_waiting: int | None
    max_context: int | None
    max_step_tokens: int | None
    max_decode_iterations: int | None
    speculation: str | None
    num_speculative_tokens: int | None
    draft_model: Any
    page_size: int
    max_adapters: int
    max_adapter_rank: int | None
    adapter_dtype: str | None
    deterministic: bool
    reranker: str | None
    end_tokens: Sequence[str | int]
    chat_template: str | Path | None
    seed: int
    warmup: bool | str
    strict: bool
    attention: str | None
    record: str | Path | None
    conversations: str | Path | None
    journal_limits: JournalLimits
    graph_loops: bool | None
    huge_pages: bool
    progress: bool


@final
@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options of `Runtime`; None means the platform's default.

    Attributes:
      policy: name of a preset, or a `jaxserve.scheduling.policy.Policy`.
      latency_bound: for policy "exegpt", maximum seconds of an answer of the 99th-percentile
        length, from admission to end; None for the highest throughput.
      first_token_bound, token_bound: for policy "exegpt", maximum seconds to the first token, and
        mean seconds per later token.
      kv_memory: memory of the page pool, in bytes or as "4GiB"; by default all that is left. On
        CPUs, a model whose layers see different windows keeps no pages behind a window, unless it
        has a `draft_model` or `disk_memory`, or `restore` is "per_layer" or "both".
      kv_dtype: dtype of the pages, by default the model's. Pages in one of `KV_DTYPES` are
        approximate, and take half the memory of bfloat16 and little more than a quarter of
        float32's. "fp8" is "float8_e4m3fn". "bfloat16" is for models in float32
        on CPUs, too, and their default if weights are in it.
      quantize: format of the layers' weights, one of `QUANTIZE`; by default the model's dtype.
        "keep" is for GGUF files: weights, the embedding's too, stay in the blocks of the file.
        Folders of GPTQ, AWQ and compressed-tensors weights are served in their own format, for
        which the option is "keep" or omitted. "w8a8" is "int8" with int8 activations on GPUs too.
        "bf16" stores the weights of a float32 model in 16 bits, on one CPU. docs/quantisation.md
        states what each costs.
      quantize_embeddings: format of the embedding and the head if `quantize` is given, one of
        `QUANTIZE_EMBEDDINGS`, by default "int8"; "none" leaves them unchanged.
      host_memory: host memory for pages that leave the device, including those of preempted
        sequences, in bytes or as "4GiB"; 0 for none. By default as much as the page pool, if that
        is under a quarter of the free host memory. Stages share it, and so do processes on one host
        that serve a model together. With recurrent layers, states have half of it and pages half,
        by default of as much as the page pool and `state_memory`, if the policy keeps pages on the
        host; a size whose half does not hold one state is refused.
      state_memory: memory for states of recurrent layers that are kept after answers, in bytes or
        as "4GiB"; 0 to keep none. By default two for each of `max_slots`, up to a sixteenth of the
        free memory. Only for models with recurrent layers, and used by policies that keep pages.
        States that leave it go to `host_memory`.
      restore: when pages are copied back from the host, one of `RESTORES`. "on_admission": all
        before the sequence's first step. "prefetch": a few with every step while the sequence
        waits. "per_layer": within the first step, each layer's while the layer before it is
        computed. "both": the last two. By default the platform's choice. The last two are not for
        models with recurrent layers.
      disk_memory: size of the files for pages that leave the host, in bytes or as "4GiB"; the
        files outlive the runtime. None by default. Needs a policy that keeps pages on the host.
        States of recurrent layers go there, too.
      disk_folder: folder of these files, used by one runtime at a time; by default one below the
        cache folder.
      predictor: predictor of output lengths, for policies that use one: a
        `predictor.LengthPredictor`, or the folder of one (`jaxserve predictor train`).
      probe: predictor of remaining lengths from the model's activations, for policies that use
        predictions: a `predictor.LengthProbe`, or the folder of one (`jaxserve predictor probe
        train`). It works with or without `predictor`.
      learns: continue to train the predictor on finished requests (`predictor.OnlineLearner`).
      max_slots: maximum number of sequences that run at once.
      max_waiting: maximum number of requests without a slot; a call that exceeds it raises
        QueueFullError; None for no limit.
      max_context: maximum number of tokens of prompt and output; by default the model's limit.
      max_step_tokens: maximum number of tokens of a step with prefill (the prefill chunk).
      max_decode_iterations: maximum number of tokens of a sequence per decode step.
      speculation: source of proposals for the next tokens, one of `SPECULATIONS`; None for none.
        "lookup": the request's own text, after an earlier occurrence of its newest tokens. Tokens
        stay the same, drawn ones too. docs/speculation.md says when it pays.
      num_speculative_tokens: maximum number of tokens proposed in an iteration, for all sequences
        together, by default 8; with stages, for those of each micro-batch. With more than twice as
        many sequences, none are proposed. Only with `speculation`.
      draft_model: the model that proposes tokens with `speculation="draft"`: a decoder, or the
        name, folder or GGUF file of one. It must have the tokenizer of the served model.
      page_size: tokens per page.
      max_adapters: maximum number of adapters that are loaded at once (`Runtime.load_adapter`), for
        which memory is allocated; 0 for a runtime without adapters (docs/adapters.md).
      max_adapter_rank: maximum rank of an adapter, by default 16. Only with `max_adapters`.
      adapter_dtype: dtype in which adapters are kept, "bfloat16"; by default that of the weights.
        Only with `max_adapters`.
      deterministic: refuse to serve if the bits of a request's tokens and log-probabilities could
        depend on other requests. On CPUs True changes nothing, and is allowed in float32 without
        tensor parallelism: the bits are the same there in any case. On NVIDIA GPUs, dense models
        are then computed by kernels that fix the order of sums (docs/batch_invariance.md).
      reranker: how a model of tokens ranks texts, "qwen3" for an original Qwen3-Reranker, which
        answers "yes" or "no" to its own prompt; None for a model that does not, and for one with a
        head for a label, whose files say it (docs/embeddings.md).
      end_tokens: tokens that end an answer, in addition to those that the model declares: texts
        such as "<|end|>", or ids.
      chat_template: Jinja source, or the path of a file with it, in place of the chat templates of
        the model's files, that for tools too.
      seed: seed for the requests that have none.
      warmup: when executables are compiled, or loaded from an earlier start, one of `WARMUPS`.
        "background": on other threads while requests are served; a request waits only for those
        that it needs. It has no effect with `strict`, for models in stages, with two device groups,
        in a process group, and for encoder-decoder models such as T5: these have "full".
        "one_request": the same, of those for a single greedy answer; others at their first use.
        "full" or True: all of them before the first request. False: each at its first use.
      strict: raise when something compiles after warm-up.
      attention: implementation of paged attention instead of the platform's choice: one of
        `jaxserve.kernels.paged_attention.IMPLEMENTATIONS`, or several separated by commas, of which
        the first that serves a shape is used. The write of keys and values uses the implementation
        of the same name, if there is one.
      graph_loops: whether decode loops on an NVIDIA GPU are recorded in CUDA graphs, where XLA does
        not record loops by default. None: as JAXSERVE_GRAPH_LOOPS=1 or 0 says, or if a test of such
        a loop passes at the first start (docs/gpus.md).
      huge_pages: read weights that an earlier start converted into huge pages of a CPU's memory,
        if the system has them. Steps are about a tenth faster, and a start takes half a second
        longer. False maps them into memory.
      record: new or empty file that gets one line per finished request, for replay by benchmarks
        (`jaxserve.workload.recorded`).
      conversations: file of the journal that keeps conversations beyond the process; None keeps
        them in memory only and writes nothing.
      journal_limits: limits on the number, size and age of conversations.
      progress: show progress bars for work that takes longer than two seconds.
    """

    policy: Any = "auto"
    latency_bound: float | None = None
    first_token_bound: float | None = None
    token_bound: float | None = None
    kv_memory: int | str | None = None
    kv_dtype: str | None = None
    quantize: str | None = None
    quantize_embeddings: str | None = None
    host_memory: int | str | None = None
    state_memory: int | str | None = None
    restore: str | None = None
    disk_memory: int | str | None = None
    disk_folder: str | Path | None = None
    predictor: Any = None
    probe: Any = None
    learns: bool = False
    max_slots: int | None = None
    max_waiting: int | None = None
    max_context: int | None = None
    max_step_tokens: int | None = None
    max_decode_iterations: int | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    draft_model: Any = None
    page_size: int = 32
    max_adapters: int = 0
    max_adapter_rank: int | None = None
    adapter_dtype: str | None = None
    deterministic: bool = False
    reranker: str | None = None
    end_tokens: Sequence[str | int] = ()
    chat_template: str | Path | None = None
    seed: int = 0
    warmup: bool | str = "background"
    strict: bool = False
    attention: str | None = None
    record: str | Path | None = None
    conversations: str | Path | None = None
    journal_limits: JournalLimits = JournalLimits()
    graph_loops: bool | None = None
    huge_pages: bool = True
    progress: bool = True

    @property
    def bounds(self) -> dict[str, float]:
        """Return the given latency bounds of policy "exegpt", in seconds by name."""
        names = ("latency_bound", "first_token_bound", "token_bound")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def warms_up_behind(self) -> bool:
        """Return whether requests are served before every executable exists."""
        return (self.warmup == "background" or self.is_for_one) and not self.strict

    @property
    def is_for_one(self) -> bool:
        """Return whether executables are compiled ahead for a single request only."""
        return self.warmup == "one_request"

    @property
    def num_proposed(self) -> int:
        """Return the maximum number of tokens proposed in an iteration; 0 without speculation."""
        if self.speculation is None:
            return 0
        return self.num_speculative_tokens or _NUM_SPECULATIVE_TOKENS

    @property
    def adapter_rank(self) -> int:
        return (self.max_adapter_rank or _MAX_ADAPTER_RANK) if self.max_adapters else 0

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> RuntimeOptions:
        """Make options from keyword arguments.

        Raises:
          InvalidConfigError: a name is unknown, or a value is not allowed.
        """
        known = [field.name for field in fields(cls)]
        if unknown := options.keys() - known:
            raise InvalidConfigError(explain_unknown(unknown, known, OPTIONS_ELSEWHERE))
        return cls(**options)

    def __post_init__(self) -> None:
        if self.kv_dtype == "auto":
            object.__setattr__(self, "kv_dtype", None)
        elif self.kv_dtype in _KV_DTYPE_NAMES:
            object.__setattr__(self, "kv_dtype", _KV_DTYPE_NAMES[self.kv_dtype])
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _RANGES or (value is None and field.default is None):
                continue
            least, most = _RANGES[field.name]
            if not _is_int(value) or not least <= value <= most:
                low = "" if least == -math.inf else f" of at least {least}"
                high = "" if most == math.inf else f" and at most {most}"
                raise InvalidConfigError(
                    f"{field.name}={value!r} is not allowed; pass a whole number{low}{high}"
                )
        if isinstance(self.end_tokens, str) or not all(
            isinstance(token, str) or _is_int(token) for token in self.end_tokens
        ):
            raise InvalidConfigError(
                f"end_tokens={self.end_tokens!r} is not allowed; pass a list of texts or ids of "
                "tokens"
            )
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", _template(self.chat_template))
        for name in ("max_adapter_rank", "adapter_dtype"):
            value = getattr(self, name)
            if value is not None and not self.max_adapters:
                raise InvalidConfigError(
                    f"{name}={value!r} without max_adapters; pass both, or omit {name}"
                )
        if self.adapter_dtype not in (None, "bfloat16"):
            raise InvalidConfigError(
                f"adapter_dtype={self.adapter_dtype!r} is not supported; pass 'bfloat16', or omit "
                "it for the dtype of the weights"
            )
        for name, bound in self.bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, Real) or not bound > 0:
                raise InvalidConfigError(
                    f"{name}={bound!r} is not allowed; pass a number of seconds above 0, or omit "
                    "it for the most throughput"
                )
        for name in ("kv_memory", "host_memory", "state_memory", "disk_memory"):
            size = getattr(self, name)
            may_be_none = name in ("host_memory", "state_memory")
            if size is not None and not (may_be_none and size == 0):
                try:
                    parse_bytes(size)
                except InvalidConfigError as error:
                    raise InvalidConfigError(f"{name}: {error}") from None
        if self.kv_dtype not in (None, *_ALL_KV_DTYPES):
            raise InvalidConfigError(
                f"kv_dtype={self.kv_dtype!r} is not supported; pass one of {_ALL_KV_DTYPES}, or "
                "omit it for the model's dtype"
            )
        if self.quantize not in (None, *QUANTIZE):
            raise InvalidConfigError(
                f"quantize={self.quantize!r} is not supported; pass one of {QUANTIZE}, or omit it "
                "for the model's dtype"
            )
        if self.quantize_embeddings not in (None, *QUANTIZE_EMBEDDINGS):
            raise InvalidConfigError(
                f"quantize_embeddings={self.quantize_embeddings!r} is not supported; pass one of "
                f"{QUANTIZE_EMBEDDINGS}"
            )
        if self.quantize_embeddings is not None and self.quantize in (None, "bf16", "keep"):
            raise InvalidConfigError(
                f"quantize_embeddings={self.quantize_embeddings!r} is not allowed with "
                f"quantize={self.quantize!r}, which has one way for the embedding and the head; "
                "omit quantize_embeddings, or pass a format such as quantize='int8'"
            )
        if self.speculation not in (None, *SPECULATIONS):
            raise InvalidConfigError(
                f"speculation={self.speculation!r} is unknown; pass one of {SPECULATIONS}, or omit "
                "it for no speculation"
            )
        if self.num_speculative_tokens is not None and self.speculation is None:
            raise InvalidConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} without speculation; pass "
                f"one of {SPECULATIONS} as speculation, or omit num_speculative_tokens"
            )
        if (self.speculation == "draft") != (self.draft_model is not None):
            raise InvalidConfigError(
                f"speculation={self.speculation!r} with draft_model={self.draft_model!r}; pass "
                "both speculation='draft' and a draft_model, or omit draft_model"
            )
        if self.reranker not in (None, *RERANKERS):
            raise InvalidConfigError(
                f"reranker={self.reranker!r} is unknown; pass one of {RERANKERS}, or omit it"
            )
        if self.restore not in (None, *RESTORES):
            raise InvalidConfigError(
                f"restore={self.restore!r} is unknown; pass one of {RESTORES}, or omit it for the "
                "platform's choice"
            )
        if self.warmup not in WARMUPS or isinstance(self.warmup, int) != isinstance(
            self.warmup, bool
        ):
            raise InvalidConfigError(
                f"warmup={self.warmup!r} is not allowed; pass one of {WARMUPS}"
            )
        if self.graph_loops not in (None, True, False):
            raise InvalidConfigError(
                f"graph_loops={self.graph_loops!r} is not allowed; pass True, False, or None for a "
                "test at the first start"
            )
        if self.disk_memory is None and self.disk_folder is not None:
            raise InvalidConfigError(
                f"disk_folder={str(self.disk_folder)!r} is used with disk_memory only; pass both"
            )


def _template(given: str | Path) -> str:
    """Return the source of a chat template that is given as such or as a file's path."""
    if isinstance(given, str) and "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (TypeError, OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"chat_template={given!r} cannot be read: {error}; pass Jinja source, or the path of a "
            "file with it"
        ) from error


def _is_int(value: Any) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
