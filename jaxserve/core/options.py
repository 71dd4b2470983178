"""How a runtime is set up: what a user may choose, validated before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.journal_limits import JournalLimits
from jaxserve.core.sizes import parse_bytes

# That keys and values can be kept in with a scale a token and head, instead of the model's own.
KV_DTYPES = ("int8", "float8_e4m3fn")

# When pages come back from the host.
RESTORES = ("on_admission", "prefetch", "per_layer", "both")


@final
@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options of `Runtime`; None means the platform's default.

    Attributes:
      policy: name of a preset, or a `jaxserve.scheduling.policy.Policy`.
      kv_memory: of the page pool, in bytes or as "4GiB"; by default what memory is left.
      kv_dtype: of the pages, one of `KV_DTYPES`, which hold twice as much as bfloat16 and nearly
        four times as much as float32, not exactly; by default the model's dtype.
      host_memory: on the host, for pages that leave the device and for the KV of preempted
        sequences, in bytes or as "4GiB"; by default as much as the page pool, if that is under a
        quarter of what is free. 0 for none.
      restore: when pages come back from the host, one of `RESTORES`. "on_admission": all of them
        before the first step of their sequence; "prefetch": a few with every step while it waits;
        "per_layer": within its first step, each layer's while the layer before is computed; "both".
        By default the platform's choice.
      disk_memory: of files for pages that leave the host, which survive the runtime, in bytes or as
        "4GiB"; none by default. Needs a policy that keeps pages on the host.
      disk_folder: for them, for one runtime at a time; one below the cache folder by default.
      predictor: of answers' lengths, for policies that use them: a `predictor.LengthPredictor`, or
        the folder of one (`jaxserve predictor train`).
      probe: reads the rest of an answer off the model's activations as tokens come, for policies
        that use predictions: a `predictor.LengthProbe`, or the folder of one (`jaxserve predictor
        probe train`). With or without a predictor.
      learns: go on training the predictor with the requests that end (`predictor.OnlineLearner`).
      max_slots: sequences that run at once.
      max_context: most tokens of prompt and output together; the model's own limit by default.
      max_step_tokens: most tokens of a step with prompts in it (the prefill chunk).
      max_decode_iterations: most tokens a sequence may get between two looks of the host.
      page_size: tokens a page.
      seed: of the requests that bring none.
      warmup: compile everything at the start; otherwise when first needed.
      strict: raise when something compiles after warm-up.
      attention: implementation of paged attention instead of the platform's choice, one of
        `pallas_kernels.paged_attention.IMPLEMENTATIONS`, or several with commas between them, of
        which the first that can serves each shape; also of the write before it where that has one
        of this name.
      record: file that gets a line for every request that ends, to be replayed by benchmarks
        (`jaxserve.workload.recorded`); new or empty.
      conversations: file of the journal that keeps conversations over the end of the process; None
        keeps them in memory only, and nothing of them is ever written.
      journal_limits: how many conversations are kept, how large, and how long.
      progress: show progress bars for anything longer than two seconds.
    """

    policy: Any = "auto"
    kv_memory: int | str | None = None
    kv_dtype: str | None = None
    host_memory: int | str | None = None
    restore: str | None = None
    disk_memory: int | str | None = None
    disk_folder: str | Path | None = None
    predictor: Any = None
    probe: Any = None
    learns: bool = False
    max_slots: int | None = None
    max_context: int | None = None
    max_step_tokens: int | None = None
    max_decode_iterations: int | None = None
    page_size: int = 32
    seed: int = 0
    warmup: bool = True
    strict: bool = False
    attention: str | None = None
    record: str | Path | None = None
    conversations: str | Path | None = None
    journal_limits: JournalLimits = JournalLimits()
    progress: bool = True

    @classmethod
    def parse(cls, options: dict[str, Any]) -> RuntimeOptions:
        """Options by name.

        Raises:
          InvalidConfigError: an unknown name, a size that is not a positive whole number, a
            `kv_dtype` that pages cannot have, or a `restore` that there is not.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise InvalidConfigError(
                f"unknown runtime option(s) {', '.join(unknown)}; known are {', '.join(known)}"
            )
        return cls(**options)

    def __post_init__(self) -> None:
        for name in (
            "max_slots",
            "max_context",
            "max_step_tokens",
            "max_decode_iterations",
            "page_size",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidConfigError(f"{name}={value!r}; give a whole number of at least 1")
        for name in ("kv_memory", "host_memory", "disk_memory"):
            size = getattr(self, name)
            if size is not None and (name, size) != ("host_memory", 0):
                try:
                    parse_bytes(size)
                except InvalidConfigError as error:
                    raise InvalidConfigError(f"{name}: {error}") from None
        if self.kv_dtype not in (None, *KV_DTYPES):
            raise InvalidConfigError(
                f"kv_dtype={self.kv_dtype!r} is not supported; give one of {KV_DTYPES}, or leave "
                "it out for the model's own dtype"
            )
        if self.restore not in (None, *RESTORES):
            raise InvalidConfigError(
                f"restore={self.restore!r} is unknown; give one of {RESTORES}, or leave it out for "
                "the platform's choice"
            )
        if self.disk_memory is None and self.disk_folder is not None:
            raise InvalidConfigError(
                f"disk_folder={str(self.disk_folder)!r} is used with disk_memory only; say how much"
            )
