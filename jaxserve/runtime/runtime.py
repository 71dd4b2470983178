"""The facade, which owns a model, its memory and the loops that serve it."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
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
from jaxserve.engine.requests import Prompt
from jaxserve.execution.protocol import ModelExecutor
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.report import Report
from jaxserve.runtime.build import build_parts, with_end_tokens
from jaxserve.runtime.loading import load_for
from jaxserve.runtime.pending import Batch, Params, Pending, submitted
from jaxserve.runtime.planned import Planned
from jaxserve.runtime.stats import RuntimeStats
from jaxserve.runtime.streams import aread, read
from jaxserve.scheduling.outlook import Outlook
from jaxserve.workload import WorkloadItem
from sharding import DeviceGroups, StagePlan

if TYPE_CHECKING:
    from predictor import OnlineLearner


@final
class Runtime(Planned):
    """A `Service` that serves one model in this process; `Service` documents its methods.

    On a mesh over several processes (`sharding.join`) each process creates the runtime with the
    same arguments. Process 0 leads: its runtime answers. The others call `follow`.

    Args:
      model: a Flax NNX decoder (`jaxserve.models`), with parameters or abstract ones.
      params: the parameters as an `nnx.State`, shared and not copied; by default the model's.
      tokenizer: the model's tokenizer; None restricts prompts and completions to token ids.
      eos_token_ids: end tokens; by default the tokenizer's.
      mesh: the mesh to shard the model over (`sharding.make_mesh`), or a `sharding.StagePlan` to
        cut it into stages, or `sharding.DeviceGroups` to compute prompts and answers on separate
        devices (`sharding.make_groups`); by default the devices of the parameters. Parameters that
        are already placed by the rules of `sharding` are not copied. Each index of the mesh's
        `data` axis is a replica with its own engine.
      wrap_executor: function for tests and measurements. It gets the executor of every replica
        after its warm-up and returns the executor that the engine drives and closes instead.
      options: see `RuntimeOptions`.

    Attributes:
      conversations: the stored conversations; `conversation` opens one.

    Raises:
      InvalidConfigError: an option is not allowed, or the mesh cannot divide the model or omits
        some of the job's processes.
      DeviceMemoryError: the device has too little memory.
      JournalError: the journal of conversations cannot be used.
      ProcessGroupError: the processes already serve another model, or some have left.
    """

    recovers = False  # see `Service`

    def __init__(
        self,
        model: nnx.Module,
        params: nnx.State | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
        mesh: Mesh | StagePlan | DeviceGroups | None = None,
        wrap_executor: Callable[[ModelExecutor], ModelExecutor] | None = None,
        **options: Any,
    ):
        self.options = RuntimeOptions.parse(options)
        tokenizer, eos_token_ids = with_end_tokens(
            tokenizer,
            eos_token_ids,
            self.options.end_tokens,
            cast(Any, model).config.vocab_size,
        )
        parts = build_parts(
            model, params, tokenizer, eos_token_ids, mesh, self.options, wrap_executor
        )
        self.tokenizer = tokenizer
        self.model_config = cast(Any, model).config
        self.conversations = parts.conversations
        self._replicas = parts.replicas
        super().__init__(parts.maintenance, parts.planner, parts.intake)
        self._forecaster = parts.forecaster
        self._weights_bytes = parts.weights_bytes
        # Closes a runtime that is dropped without `close`, as in notebooks.
        self._finalizer = weakref.finalize(self, parts.close)
        if parts.group is not None:
            parts.group.before_leaving(self._finalizer)
        parts.start()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        revision: str | None = None,
        load: Literal["auto", "random"] = "auto",
        dtype: str | None = None,
        mesh: Mesh | StagePlan | DeviceGroups | None = None,
        wrap_executor: Callable[[ModelExecutor], ModelExecutor] | None = None,
        **options: Any,
    ) -> Runtime:
        """Create a runtime for a model by its name, from a Hugging Face folder or a GGUF file.

        Args:
          name_or_path: a registered name, a path, or a name of the Hugging Face Hub: `org/name`,
            `org/name@revision`, or `org/name:Q4_K_M` for a GGUF file. What is missing is
            downloaded into the Hub's cache.
          revision: a branch, tag or commit of the Hub.
          load: "random" draws random weights for the folder's config.json and reads no weights.
          dtype: "float32", "bfloat16" or "float16"; by default the platform's.
          mesh: see `Runtime`; weights are read directly onto their shards.
          wrap_executor: see `Runtime`.
          options: see `RuntimeOptions`.

        Raises:
          UnknownModelError, UnsupportedModelError, CheckpointError, DownloadError,
          ModelCacheError, InvalidConfigError, DeviceMemoryError, JournalError
        """
        if revision is not None:
            from jaxserve.models.registry import at_revision

            name_or_path = at_revision(name_or_path, revision)
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
        """Whether this process answers: process 0 of several, or the only process."""
        group = self._replicas.group
        return group is None or group.is_leader

    def follow(self) -> None:
        """Take part in the leader's steps. Call it on every process except the leader.

        It returns when the leader closes its runtime or calls `dismiss_followers`. During the call
        only the leader reacts to Ctrl-C. If any process dies, this process ends too.

        Raises:
          ProcessGroupError: this process leads.
          RuntimeClosedError: the leader has already closed its runtime.
        """
        if self._replicas.group is None:
            raise ProcessGroupError(
                "this process serves the model alone, so there is no leader to follow; call "
                "follow() only on processes where rt.is_leader is false"
            )
        self._replicas.group.follow()

    def dismiss_followers(self) -> None:
        """End `follow` on the other processes when all requests have ended. Call it on the leader.

        Call it before work that all processes share, such as a training step and `update_params`.
        Requests that are submitted afterwards wait until the others follow again. It does nothing
        if this process is the only one.

        Raises:
          ProcessGroupError: this process follows.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.dismiss_followers()

    # ---- answers: see `Service` ----

    @overload
    def generate(
        self, prompts: str, params: Params = None, *, progress: bool | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Any, params: Params = None, *, progress: bool | None = None
    ) -> Any: ...

    def generate(self, prompts: Any, params: Params = None, *, progress: bool | None = None) -> Any:
        """Answer one prompt, or a batch of them in their order; see `Service.generate`."""
        batch = Batch.of(prompts, params)
        show = self.options.progress if progress is None else progress
        return batch.wait(self._intake.submit_batch(batch), progress=show)

    async def agenerate(self, prompts: Any, params: Params = None) -> Any:
        """`generate` for asyncio. Cancelling the task cancels its requests."""
        batch = Batch.of(prompts, params)
        self._replicas.check_may_wait()
        pending = await submitted(lambda: self._intake.submit_batch(batch), batch.params)
        return await batch.await_(pending)

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
        """Submit one request, and return at once; see `Service.submit`."""
        return self._intake.submit(
            prompt, params, request_id=request_id, priority=priority, deadline_s=deadline_s,
            conversation_id=conversation_id, on_piece=on_piece,
        )  # fmt: skip

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, a text or a chat, as `submit` makes them.

        Raises:
          InvalidRequestError: the prompt cannot be served; a subclass of it.
          MissingExtraError
        """
        return self._intake.prompt_tokens(prompt)

    def submit_items(self, items: Sequence[WorkloadItem]) -> list[Pending]:
        """Submit requests of a workload that arrive now; a replica starts its own in one iteration.

        Raises:
          InvalidRequestError: an item cannot be served, so none is submitted; a subclass of it.
        """
        return self._intake.submit_items(items)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece]:
        """Yield the pieces of a completion; see `Service.stream`."""
        self._replicas.check_may_wait()
        params, submit = params or SamplingParams(), self._intake.submit
        return read(lambda sink: submit(prompt, params, on_piece=sink), params.n)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        params, submit = params or SamplingParams(), self._intake.submit
        return aread(lambda sink: submit(prompt, params, on_piece=sink), params)

    def encode(self, prompts: Any) -> Any:
        """Return the encoder's output for one prompt, or a batch, of an encoder-decoder model.

        Steps of running requests go on between the encoder's. Nothing is cached.

        Args:
          prompts: a prompt or a list of them, as in `generate`; each at most
            `config.max_prompt_tokens` tokens, with those that the tokenizer adds.

        Returns:
          float32 [tokens, hidden_size] for a prompt, after the encoder's last norm; a list of them
          for a list.

        Raises:
          UnsupportedModelError: the model has no encoder.
          InvalidRequestError: a prompt cannot be encoded, so none is; a subclass of it.
          ProcessGroupError: several processes serve the model.
          RuntimeClosedError, EngineFailedError
        """
        return self._intake.encode(prompts)

    def cancel(self, request_id: str) -> None:
        """End a request with the tokens so far; do nothing if it has ended or is unknown."""
        self._replicas.cancel(request_id)

    def conversation(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Start or continue a conversation; see `Service.conversation`."""
        self._replicas.check_leads()
        return self.conversations.open(id, system=system, messages=messages)

    # ---- the runtime itself ----

    @property
    def config(self) -> EngineConfig:
        """The present sizes of the executables and of the page pool."""
        return self._replicas.first.executor.config

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        return self.model_config.vocab_size

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self._replicas.max_length

    def is_ready(self) -> bool:
        """Return whether a first request would wait for no compilation; see `Service.is_ready`."""
        return all([replica.executor.is_ready() for replica in self._replicas.all])

    def stats(self, *, wait: bool = True) -> RuntimeStats:
        """Return a snapshot of the counters, which there are at any time; see `Service.stats`."""
        return RuntimeStats.of(
            self._replicas,
            self._planner,
            weights_bytes=self._weights_bytes,
            predicting_s=0.0 if self._forecaster is None else self._forecaster.seconds,
            adapters=self._maintenance.adapters.usage,
        )

    def outlook(self) -> dict[str, Outlook]:
        """Return the tokens and seconds that each unfinished request is expected to take, by id.

        A request whose last token is being computed is left out.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        return self._replicas.outlook()

    def report(self) -> Report:
        """Return the report so far: figures, a table, JSON, a trace, a picture."""
        return self._replicas.report(self._planner.in_force)

    def check_integrity(self) -> None:
        """Check that the counts of pages and slots are consistent, between two steps, for tests.

        Raises:
          AssertionError: they contradict each other.
          RuntimeClosedError, EngineFailedError
        """
        self._replicas.check_integrity()

    @property
    def learner(self) -> OnlineLearner | None:
        """The online trainer of the length predictor; None without `learns=True`."""
        return None if self._forecaster is None else self._forecaster.learner

    def resize_kv(self, size: int | str) -> int:
        """Resize the page pool, for instance to free memory for a trainer's step.

        Running requests continue with the same tokens. Only pages beyond the new end move. Requests
        are preempted, the last in the policy's order first, until the others fit. Length limits of
        answers are cut to what the pool holds, as at submission. A request that has no room for its
        next token even alone fails with PromptTooLongError, as does a prompt that does not fit and
        is submitted before the pool grows again.

        The runtime compiles for a new size, with a progress bar, and keeps the executables of
        earlier sizes, so alternate between few sizes. While pages are copied, the device holds one
        buffer of the smaller pool beside the larger: a layer's keys on CPUs, half of it on GPUs.

        Args:
          size: bytes on each device, or a text such as "4GiB", rounded down to whole pages and to
            what all slots can use. 0 leaves two pages, of which requests can use one.

        Returns:
          Bytes of the pool on each device.

        Raises:
          DeviceMemoryError: the memory is not enough; nothing has changed.
          InvalidConfigError: `size` is not a size, or several processes serve the model.
          RuntimeClosedError, EngineFailedError
        """
        return self._maintenance.resize_kv(size)

    def close(self) -> None:
        """Cancel every request and free the page pool, but not the parameters.

        On a leader it also ends `follow` on the other processes.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
