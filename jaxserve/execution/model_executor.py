"""The executor of a model, as a `Runtime` needs it, and a step that it has submitted."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CompilationAfterWarmupError, RuntimeClosedError
from jaxserve.execution.executor import Executor
from jaxserve.memory.page_pool import Moves
from jaxserve.scheduling.plan import PromptLogprobs, StepPlan, StepResult
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.sampling.sampler import SamplingNeeds
from jaxserve.steps.step_function import STALL_EVENT, has_deleted

_EVENTS = ("/jax/core/compile/backend_compile_duration", STALL_EVENT)


@final
class CompilationCounter:
    """A counter of the compilations in its `watch` blocks, on the thread of the block.

    Loading an executable, or waiting for a thread that compiles it, also counts: it stalls the
    loop. If `strict`, a compilation after the warm-up raises CompilationAfterWarmupError.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.count = 0
        self._is_warm = False
        self._strict = strict
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that a compilation is a stall."""
        return self._is_warm

    def expect_none(self, is_warm: bool = True) -> None:
        """Set whether a compilation counts as a stall from now on."""
        self._is_warm = is_warm

    @contextmanager
    def watch(self, plan: StepPlan) -> Iterator[None]:
        """Count compilations in the block, which submits `plan`."""
        before = self.count
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
        if self._strict and self._is_warm and self.count > before:
            raise CompilationAfterWarmupError(
                f"step {plan.index} ({len(plan.rows)} rows, {plan.num_tokens} tokens) compiled "
                f"{self.count - before} executables after warm-up; report this as a bug, or serve "
                "without strict=True"
            )

    def close(self) -> None:
        self._thread = None
        # JAX asserts that it is there, and other libraries clear all listeners (Tunix does).
        with suppress(AssertionError):
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS and self._thread == threading.get_ident():
            self.count += 1


class Resizable(Protocol):
    def resize(self, num_pages: int, moves: Moves) -> None: ...


def resize_all(parts: Sequence[Resizable], old: int, new: int, moves: Moves) -> None:
    """Resize every part from `old` to `new` pages; if one fails, all have their old size again."""
    done: list[Resizable] = []
    try:
        for part in parts:
            part.resize(new, moves)
            done.append(part)
    except Exception:
        for part in done:
            part.resize(old, [(target, source) for source, target in moves])
        raise


class ModelExecutor(Executor):
    """An executor with a model's parameters and executables, as a `Runtime` needs it.

    Attributes:
      prepares_in_parallel: whether several threads may call the functions of `warmup_steps` except
        the last.
    """

    prepares_in_parallel: bool = False

    def __init__(self, config: EngineConfig, *, strict: bool):
        self.config = config
        self._compilations = CompilationCounter(strict=strict)
        self._is_closed = False
        # Cache sizes for which every executable is compiled.
        self._warm_num_pages: set[int] = set()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("the executor was closed; create a new runtime")

    @property
    def num_compilations(self) -> int:
        """Number of executables that `submit` compiled or read from the persistent cache."""
        return self._compilations.count

    @property
    def is_warm(self) -> bool:
        """Whether every executable is compiled for a pool of the present size."""
        return self._compilations.is_warm

    @abc.abstractmethod
    def warmup_steps(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return (name, function) of every executable; calling a function compiles it.

        The functions advance no slot and write to the null page only. Call `finish_warmup` last.
        """

    def warm_up_behind(self, *, for_one: bool = False) -> bool:
        """Start to compile every executable on other threads, and return at once.

        With `for_one`, only those for a single greedy answer. A step that needs a missing
        executable compiles it, or waits for it. Return False if the executor cannot; then nothing
        is started, and `warmup_steps` must be called.
        """
        return False

    def is_ready(self) -> bool:
        """Return whether a first request waits for no executable of `warm_up_behind`.

        Executables for a single request, greedy or drawn, exist then. The first call ends the
        pause after which they are made if an earlier start has left them. True without a warm-up.
        """
        return True

    def finish_warmup(self) -> None:
        """Treat every later compilation as a stall, and in strict mode as an error."""
        self._warm_num_pages.add(self.config.num_pages)
        self._compilations.expect_none()

    @property
    @abc.abstractmethod
    def num_buffers(self) -> int:
        """Size of the whole page cache, in units of its largest buffer."""

    @property
    @abc.abstractmethod
    def device(self) -> Any:
        """The jax.Device of this process whose memory limits the page cache."""

    @abc.abstractmethod
    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the encoder's output for each prompt, float32 [tokens, embed], now.

        Only for a model with an encoder; prompts have at most `max_step_tokens` tokens together.

        Raises:
          ProcessGroupError: several processes serve the model.
          RuntimeClosedError: the executor was closed.
        """

    @abc.abstractmethod
    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        """Return the whole model's `params` on the executor's devices, as `update_params` needs.

        Floating dtypes become those of the present parameters.

        Args:
          partial: whether parameters that `params` lacks stay as they are.

        Raises:
          InvalidParamsError: structure, shapes or dtypes differ from those of the present
            parameters.
          RuntimeClosedError: the executor was closed.
        """

    @property
    @abc.abstractmethod
    def params(self) -> Any:
        """The parameters that the next step computes with, as `update_params` takes them."""

    @property
    def has_lost_params(self) -> bool:
        return has_deleted(self.params)

    @property
    def whole_params(self) -> Any:
        """The parameters of the whole model as one state; None if they are in several parts."""
        return None

    @abc.abstractmethod
    def update_params(self, params: Any) -> None:
        """Replace the parameters for all later steps by `params`, which `fitted` returned."""

    @abc.abstractmethod
    def drop_params(self) -> None:
        """Drop the references to the parameters; no step follows before the next update."""


@final
@dataclass(frozen=True)
class PromptPart:
    """Prompt log-probabilities of a mixed step: arrays over its tokens, and spans of rows."""

    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    spans: dict[int, slice]


@final
@dataclass(frozen=True)
class PooledPart:
    """What the pooling rows of a mixed step deliver: [slots, width], and where each row is."""

    array: jax.Array
    places: dict[int, int]


@final
class SubmittedStep:
    """A step on the device, whose results `collect` reads.

    Args:
      needs: sampler features of the plan's rows; they decide which log-probabilities are read.
      marker: an array that is ready when the step has been computed.
      outputs: outputs of the rows that sample, in one part per micro-batch; may be empty.
      output_rows: int32 [plan rows], the index of each row in the concatenated parts; -1 for a row
        that does not sample.
      prompt_part: prompt log-probabilities; None if no row returns them.
      pooled: what rows that pool deliver, in one part per micro-batch; may be empty.
    """

    def __init__(
        self,
        plan: StepPlan,
        needs: SamplingNeeds,
        marker: jax.Array,
        outputs: Sequence[Outputs],
        output_rows: np.ndarray,
        prompt_part: PromptPart | None = None,
        pooled: Sequence[PooledPart] = (),
    ):
        self._plan = plan
        self._needs = needs
        self._marker = marker
        self._outputs = outputs
        self._output_rows = output_rows
        self._prompt_part = prompt_part
        self._pooled = pooled
        for array in self._wanted():
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._marker.is_ready()  # pyrefly: ignore[missing-attribute]

    def collect(self) -> StepResult:
        num_rows = len(self._plan.rows)
        pooled = self._pooled_rows()
        is_broken = [i for i, each in (pooled or {}).items() if not np.isfinite(each).all()]
        if not self._outputs:
            self._marker.block_until_ready()
            tokens = np.zeros((num_rows, 1), np.int32)
            counts = np.zeros(num_rows, np.int32)
            finite = np.ones(num_rows, np.bool_)
            finite[is_broken] = False
            scores = self._prompt_logprobs()
            return StepResult(tokens, counts, finite, prompt_logprobs=scores, pooled=pooled)
        samples = self._output_rows >= 0
        needs = self._needs
        finite = self._by_row("finite") | ~samples
        finite[is_broken] = False
        return StepResult(
            tokens=self._by_row("tokens"),
            num_tokens=np.where(samples, self._by_row("num_tokens"), 0),
            finite=finite,
            logprobs=self._by_row("logprobs") if needs.logprobs else None,
            processed_logprobs=self._by_row("processed_logprobs") if needs.logprobs else None,
            top_ids=self._by_row("top_ids") if needs.top_logprobs else None,
            top_logprobs=self._by_row("top_logprobs") if needs.top_logprobs else None,
            prompt_logprobs=self._prompt_logprobs(),
            pooled=pooled,
            remaining=self._by_row_if_any("remaining"),
            proposals=self._by_row_if_any("proposals"),
        )

    def _by_row_if_any(self, name: str) -> np.ndarray | None:
        return None if getattr(self._outputs[0], name) is None else self._by_row(name)

    def _by_row(self, name: str) -> np.ndarray:
        parts = [np.asarray(getattr(part, name)) for part in self._outputs]
        return np.concatenate(parts)[self._output_rows]

    def _prompt_logprobs(self) -> dict[int, PromptLogprobs] | None:
        if self._prompt_part is None:
            return None
        arrays = [np.asarray(array) for array in self._prompt_part.arrays]
        return {
            row: PromptLogprobs(*(array[span] for array in arrays))
            for row, span in self._prompt_part.spans.items()
        }

    def _pooled_rows(self) -> dict[int, np.ndarray] | None:
        if not self._pooled:
            return None
        found: dict[int, np.ndarray] = {}
        for part in self._pooled:
            array = np.asarray(part.array)
            for row, place in part.places.items():  # a row may be cut into several micro-batches
                found[row] = found.get(row, np.float32(0)) + array[place].astype(np.float32)
        return found

    def _wanted(self) -> list[jax.Array]:
        wanted: list[jax.Array | None] = []
        if self._prompt_part is not None:
            wanted += self._prompt_part.arrays
        wanted += [part.array for part in self._pooled]
        for out in self._outputs:
            wanted += [out.tokens, out.num_tokens, out.finite]
            wanted += [out.logprobs, out.processed_logprobs] if self._needs.logprobs else []
            wanted += [out.top_ids, out.top_logprobs] if self._needs.top_logprobs else []
            wanted += [out.remaining, out.proposals]
        return [array for array in wanted if array is not None]
