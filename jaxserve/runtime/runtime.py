"""The facade: one object that owns a model, its memory and the loop that serves it."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, final, overload

from flax import nnx
from jax.sharding import Mesh

from jaxserve.conversations import Conversation
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ProcessGroupError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.loop import Running
from jaxserve.engine.requests import Prompt
from jaxserve.execution.protocol import ModelExecutor
from jaxserve.memory.page_cache import Tier
from jaxserve.planning import StepTimes
from jaxserve.report import Report
from jaxserve.runtime.batches import Batch, Params
from jaxserve.runtime.loading import load_for
from jaxserve.runtime.parts import build_parts
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.stats import RuntimeStats
from jaxserve.scheduling.outlook import Outlook
from jaxserve.workload import WorkloadItem
from sharding import StagePlan

if TYPE_CHECKING:
    from predictor import OnlineLearner


@final
class Runtime:
    """Serves one model. Thread-safe; use as a context manager or `close` it.

    On a mesh over several processes (`sharding.join`) all of them make it, with the same arguments.
    Process 0 leads: its runtime answers. The others call `follow`.

    Args:
      model: a Flax NNX decoder (`jaxserve.models`), its parameters in place or abstract.
      params: the parameters as an `nnx.State`, shared and not copied; the model's own if None.
      tokenizer: None restricts prompts to token ids, and answers to token ids.
      eos_token_ids: end tokens; the tokenizer's by default.
      mesh: to shard the model over, as `sharding.make_mesh` gives, or a `sharding.StagePlan` to
        cut it into stages; by default where the parameters are. Those that are there already as
        the rules of `sharding` want them are not copied. Each index of its `data` axis is a replica
        with an engine of its own.
      wrap_executor: for tests and measurements: gets every replica's executor when it is built and
        warm, and returns the one that the engine drives and closes in its place.
      options: see `RuntimeOptions`.

    Attributes:
      conversations: those that are kept; `conversation` opens one.

    Raises:
      InvalidConfigError: also for a mesh that cannot share out the model, or that leaves out some
        of the job's processes.
      DeviceMemoryError
      JournalError: the journal of conversations cannot be used.
      ProcessGroupError: the processes serve another model already, or some have left.
    """

    def __init__(
        self,
        model: nnx.Module,
        params: nnx.State | None = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        mesh: Mesh | StagePlan | None = None,
        wrap_executor: Callable[[ModelExecutor], ModelExecutor] | None = None,
        **options: Any,
    ):
        self.options = RuntimeOptions.parse(options)
        parts = build_parts(
            model, params, tokenizer, eos_token_ids, mesh, self.options, wrap_executor
        )
        self.tokenizer = tokenizer
        self.model_config = cast(Any, model).config
        self.conversations = parts.conversations
        self._replicas = parts.replicas
        self._intake = parts.intake
        self._upkeep = parts.upkeep
        self._forecaster = parts.forecaster
        self._weights_bytes = parts.weights_bytes
        # For runtimes that are dropped without `close`, as notebooks do.
        self._finalizer = weakref.finalize(self, parts.close)
        if parts.group is not None:
            parts.group.before_leaving(self._finalizer)
        parts.start()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        load: Literal["auto", "random"] = "auto",
        dtype: str | None = None,
        mesh: Mesh | StagePlan | None = None,
        wrap_executor: Callable[[ModelExecutor], ModelExecutor] | None = None,
        **options: Any,
    ) -> Runtime:
        """A runtime around a registered model, a Hugging Face folder or a GGUF file.

        Args:
          load: "random" makes random weights for the folder's config.json instead of reading any.
          dtype: "float32", "bfloat16" or "float16"; by default the platform's.
          mesh: as above; weights are read straight onto their shards.
          wrap_executor: as above.
          options: see `RuntimeOptions`.

        Raises:
          UnknownModelError, UnsupportedModelError, CheckpointError, DownloadError,
          ModelCacheError, InvalidConfigError, DeviceMemoryError, JournalError
        """
        loaded = load_for(
            RuntimeOptions.parse(options), name_or_path, load=load, dtype=dtype, mesh=mesh
        )
        return cls(
            nnx.merge(loaded.graphdef, loaded.params),
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            mesh=mesh,
            wrap_executor=wrap_executor,
            **options,
        )

    # ---- several processes ----

    @property
    def is_leader(self) -> bool:
        """Whether this process is the one to ask: process 0 of several, or the only one."""
        return self._replicas.follower is None

    def follow(self) -> None:
        """On every process but the leader: take part in its steps until it is done.

        Returns when the leader closes its runtime or calls `dismiss_followers`. Ctrl-C is left to
        the leader meanwhile. If the leader, or any other process, dies, this one ends too.

        Raises:
          ProcessGroupError: this is the leader.
          RuntimeClosedError: the leader has closed its runtime before.
        """
        follower = self._replicas.follower
        if follower is None:
            raise ProcessGroupError(
                "this process leads, or is the only one, and has nobody to follow; call follow() "
                "where rt.is_leader is false"
            )
        follower.follow()

    def dismiss_followers(self) -> None:
        """On the leader: let `follow` return on the others, once all requests have ended.

        For work between answers that all processes share, such as a training step and
        `update_params`. What is asked of the leader meanwhile waits until they follow again. Does
        nothing where this process is the only one.

        Raises:
          ProcessGroupError: this process follows.
          RuntimeClosedError, EngineFailedError
        """
        self._upkeep.dismiss_followers()

    # ---- answers ----

    @overload
    def generate(
        self, prompts: str, params: Params = None, *, progress: bool | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Any, params: Params = None, *, progress: bool | None = None
    ) -> Any: ...

    def generate(
        self, prompts: Any, params: Params = None, *, progress: bool | None = None
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a batch of them in their order.

        A prompt is a text (taken as it is), a list of token ids, or a list of chat messages (put
        through the model's chat template). In a batch, a request that fails is a `Completion`
        with its `error`; the others are unharmed. A single prompt's error is raised.

        Ctrl-C returns what there is: requests that had not ended have `finish_reason` "cancelled".

        Args:
          params: for all prompts, or one a prompt; greedy and 256 tokens by default.
          progress: show a bar when it takes over two seconds; `options.progress` by default.
        """
        batch = Batch.of(prompts, params)
        show = self.options.progress if progress is None else progress
        return batch.wait(self._intake.submit_batch(batch), progress=show)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        conversation_id: str | None = None,
        on_piece: PieceSink | None = None,
    ) -> Pending:
        """Hand in one request and return at once.

        Args:
          request_id: unique among running requests; one is made up by default.
          priority: higher goes first under a priority order.
          deadline_s: seconds from now; breaks ties of priority under a priority order.
          conversation_id: for reports and recordings, whose turn this is where you keep the history
            yourself; see `conversation`.
          on_piece: gets what `stream` would yield, on an engine's thread, which must not wait:
            `generate`, `update_params` and their like are refused there.

        Raises:
          InvalidRequestError: one of its subclasses.
        """
        return self._intake.submit(
            prompt, params, request_id=request_id, priority=priority, deadline_s=deadline_s,
            conversation_id=conversation_id, sink=on_piece,
        )  # fmt: skip

    def submit_items(self, items: Sequence[WorkloadItem]) -> list[Pending]:
        """Hand in requests of a workload that arrive now; a replica's start in one iteration.

        Raises:
          InvalidRequestError: one of its subclasses; then none is handed in.
        """
        return self._intake.submit_items(items)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece]:
        """Yield an answer piece by piece; leaving the loop early cancels the request."""
        return self._intake.stream(prompt, params)

    async def agenerate(self, prompts: Any, params: Params = None) -> Any:
        """`generate` for asyncio; cancelling the task cancels its requests."""
        batch = Batch.of(prompts, params)
        return await batch.await_(self._intake.submit_batch(batch))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        return self._intake.astream(prompt, params)

    def conversation(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Begin a conversation, or go on with one; `send` and `stream` of it ask and remember.

        Conversations are kept in memory, and with the option `conversations` in a journal that
        outlives the process. `rt.conversations` lists and deletes them.

        Args:
          id: of the conversation; one that is known goes on where it ended. Made up by default.
          system: the system message of a new one.
          messages: that a new one begins with, after `system`; for instance another's `history`.

        Raises:
          InvalidConfigError: the id is no id, or it is known and began with other messages.
          InvalidRequestError: the messages are none.
          OtherModelError: the conversation of this id is in another model's tokens.
          JournalError, RuntimeClosedError
        """
        self._replicas.check_leads()
        return self.conversations.open(id, system=system, messages=messages)

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; one that has ended already is left alone."""
        self._replicas.cancel(request_id)

    # ---- the runtime itself ----

    @property
    def config(self) -> EngineConfig:
        """What the executables are compiled for, as of now."""
        return self._replicas.first.executor.config

    def stats(self) -> RuntimeStats:
        """A snapshot of the counters."""
        return RuntimeStats.of(
            self._replicas,
            weights_bytes=self._weights_bytes,
            predicting_s=0.0 if self._forecaster is None else self._forecaster.seconds,
        )

    def outlook(self) -> dict[str, Outlook]:
        """What is expected of each request that has not ended, by id: tokens and seconds to come.

        One whose last token is being computed is not among them.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        return self._replicas.outlook()

    def report(self) -> Report:
        """What happened so far: figures, a table, JSON, a trace, a picture."""
        return self._replicas.report()

    def check_integrity(self) -> None:
        """Check the books of pages and slots between two steps, as tests do.

        Raises:
          AssertionError: they contradict each other.
          RuntimeClosedError, EngineFailedError
        """
        self._replicas.check_integrity()

    @property
    def learner(self) -> OnlineLearner | None:
        """What goes on training the length predictor; None without `learns=True`."""
        return None if self._forecaster is None else self._forecaster.learner

    def update_params(self, params: nnx.State, *, running: Running = "finish") -> None:
        """Serve other weights from here on, as a trainer has them after a step.

        Arrays that lie where the old ones do are shared and not copied, and nothing is compiled;
        others are moved there. The old ones are let go. Of several processes all call it, while
        none follows (`dismiss_followers`).

        Args:
          params: of the same structure, shapes and dtypes.
          running: what becomes of requests from before: "finish" waits until they have ended with
            the old weights, "abort" cancels them, "restart" lets them begin anew with the new
            ones. One that has shown tokens to a stream, or ended one of its samples, keeps its
            tokens and goes on with the new weights. Requests that come meanwhile wait, or are
            answered by a replica that has not paused yet.

        Raises:
          InvalidConfigError: the parameters do not fit.
          RuntimeClosedError, EngineFailedError
        """
        self._upkeep.update_params(params, running)

    def residency(self, token_ids: Sequence[int]) -> list[Tier]:
        """Where the KV of each full page of a context lies, as of now: of a conversation's, say.

        `jaxserve.report.draw_residency` draws it. Of several replicas the one that has most of it.
        """
        return self._upkeep.residency(token_ids)

    def forget_kept_pages(self) -> None:
        """For measurements: requests from here on compute their whole prompts; others go on.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        self._upkeep.forget_kept_pages()

    def resize_kv(self, size: int | str) -> int:
        """Give memory of the page pool back, for a trainer's step, or take it again.

        Requests that run go on and have the same answers: pages move only where they lie beyond
        the new end; the last in the policy's order are preempted until the others fit. An answer's
        length limit is cut to what the pool holds, as at submission. A request that has no room for
        its next token even alone fails with PromptTooLongError, and so do prompts that are
        submitted meanwhile and do not fit; after growing they are served again.

        A size that is new is compiled for, behind the progress bar; executables of earlier ones are
        kept, so go back and forth between few. While pages are copied, one buffer of the smaller
        pool lies beside the larger pool: a layer's keys on CPUs, half that pool on GPUs.

        Args:
          size: bytes on each device, or such as "4GiB", rounded down to whole pages; never more
            than all slots can use. 0 leaves two pages, of which requests can use one.

        Returns:
          Bytes of the pool on each device.

        Raises:
          DeviceMemoryError: the memory is not there; nothing has changed.
          InvalidConfigError: not a size, or the model is served by several processes.
          RuntimeClosedError, EngineFailedError
        """
        return self._upkeep.resize_kv(size)

    def measure_step_times(self, *, rounds: int = 2) -> StepTimes:
        """Time every shape of step that a replica has compiled, for `planning.simulate`.

        Waits until no request runs; those submitted meanwhile start afterwards. `rounds` repeat
        the whole measurement, and medians count. Kept pages are overwritten; what is kept later is
        valued by these times.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        return self._upkeep.measure_step_times(rounds)

    def load_step_times(self, path: str | Path) -> StepTimes:
        """Step times that were measured on this model, device and configuration, and saved.

        Kept pages are valued by them from here on.

        Raises:
          InvalidProfileError: they were measured on another, or the file does not hold any.
          RuntimeClosedError, EngineFailedError
        """
        return self._upkeep.load_step_times(path)

    def close(self) -> None:
        """Cancel what is left and free the page pool; parameters stay with who else holds them.

        On a leader it ends the others' `follow`.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
