"""The facade: one object that owns a model, its memory and the loop that serves it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast, final, get_args, overload

from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.clock import WallClock
from jaxserve.core.errors import InvalidConfigError, InvalidRequestError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion, Request, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.answers import Answer, Piece, PieceSink, failed_completion
from jaxserve.engine.assembly import (
    build_executor,
    enable_compilation_cache,
    fitted,
    nbytes,
    platform_defaults,
    resized,
    sharded,
    warm_up,
)
from jaxserve.engine.device_errors import out_of_memory_as
from jaxserve.engine.device_executor import DeviceExecutor
from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import EngineLoop, Running
from jaxserve.engine.requests import Prompt, RequestBuilder, as_batch
from jaxserve.planning import Origin, StepTimes, measure
from jaxserve.report import Report
from jaxserve.runtime.batches import Params, for_each, only, wait
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.stats import RuntimeStats
from jaxserve.runtime.streams import aread, read
from jaxserve.scheduling.presets import get_policy
from jaxserve.workload import WorkloadItem
from jaxserve.workload.recorded import TraceWriter, check_is_free


@final
class Runtime:
    """Serves one model from one process. Thread-safe; use as a context manager or `close` it.

    Args:
      model: a Flax NNX decoder (`jaxserve.models`), its parameters in place or abstract.
      params: the parameters as an `nnx.State`, shared and not copied; the model's own if None.
      tokenizer: None restricts prompts to token ids, and answers to token ids.
      eos_token_ids: end tokens; the tokenizer's by default.
      mesh: to shard the model over, as `sharding.make_mesh` gives; by default where the parameters
        are. Those that are there already as the rules of `sharding` want them are not copied.
      options: see `RuntimeOptions`.

    Raises:
      InvalidConfigError: also for a mesh that cannot share out the model.
      DeviceMemoryError
    """

    def __init__(
        self,
        model: nnx.Module,
        params: nnx.State | None = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        self.options = RuntimeOptions.parse(options)
        policy = get_policy(self.options.policy)
        if self.options.record is not None:
            check_is_free(self.options.record)
        enable_compilation_cache()
        graphdef, own_params = nnx.split(model)
        decoder = cast(Any, model)
        self.tokenizer = tokenizer
        self.model_config = decoder.config
        self._clock = WallClock()
        used = own_params if params is None else params
        if mesh is not None:
            used = sharded(used, mesh, decoder.config)
        with out_of_memory_as(
            "making the page pool and warming up",
            "give a smaller kv_memory, max_step_tokens or max_slots",
        ):
            self._executor, self._pool_size = build_executor(
                graphdef, used, decoder.config, decoder.layer_layout, self.options
            )
        self._weights_bytes = nbytes(used)
        self.config = self._executor.config
        self._origin = Origin.of(decoder.config, used, self.config)
        self._engine = Engine(self._executor, policy, self._clock)
        tokenizer_ends: Sequence[int] = () if tokenizer is None else tokenizer.eos_token_ids
        self._requests = RequestBuilder(
            tokenizer,
            eos_token_ids=tokenizer_ends if eos_token_ids is None else eos_token_ids,
            vocab_size=decoder.config.vocab_size,
            max_prompt_tokens=self.config.max_prompt_tokens,
            seed=self.options.seed,
        )
        record = self.options.record
        trace = None if record is None else TraceWriter(record, origin_s=self._clock.now())
        self._loop = EngineLoop(self._engine, self._clock, trace)
        # For runtimes that are dropped without `close`, as notebooks do.
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._executor, trace)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        load: Literal["auto", "random"] = "auto",
        dtype: str | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> Runtime:
        """A runtime around a registered model, a Hugging Face folder or a GGUF file.

        Args:
          load: "random" makes random weights for the folder's config.json instead of reading any.
          dtype: "float32", "bfloat16" or "float16"; by default the platform's.
          mesh: as above; weights are read straight onto their shards.
          options: see `RuntimeOptions`.

        Raises:
          UnknownModelError, UnsupportedModelError, CheckpointError, DownloadError,
          ModelCacheError, InvalidConfigError, DeviceMemoryError
        """
        from jaxserve.models.store import load_model

        parsed = RuntimeOptions.parse(options)
        get_policy(parsed.policy)
        if parsed.record is not None:
            check_is_free(parsed.record)
        enable_compilation_cache()
        defaults = platform_defaults()
        with out_of_memory_as("loading the weights", "give a smaller dtype or a smaller model"):
            loaded = load_model(
                name_or_path,
                dtype=dtype or defaults.dtype,
                load=load,
                seed=parsed.seed,
                layer_layout=cast(Any, defaults.layer_layout),
                mesh=mesh,
                progress=parsed.progress,
            )
        return cls(
            nnx.merge(loaded.graphdef, loaded.params),
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            **options,
        )

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
        batch, single = as_batch(prompts)
        if single:
            completion = self._run(batch, [only(params)], progress)[0]
            if completion.error is not None:
                raise completion.error
            return completion
        return self._run(batch, for_each(params, len(batch)), progress)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Pending:
        """Hand in one request and return at once.

        Args:
          request_id: unique among running requests; one is made up by default.
          priority: higher goes first under a priority order.
          deadline_s: seconds from now; breaks ties of priority under a priority order.

        Raises:
          InvalidRequestError: one of its subclasses.
        """
        now = self._clock.now()
        request = self._requests.build(
            prompt,
            params or SamplingParams(),
            now,
            request_id=request_id,
            priority=priority,
            deadline_s=None if deadline_s is None else now + deadline_s,
        )
        answer = self._answer(request)
        self._loop.submit(answer)
        return Pending(answer, self.cancel)

    def submit_items(self, items: Sequence[WorkloadItem]) -> list[Pending]:
        """Hand in requests of a workload that arrive now; they start in the same iteration.

        Raises:
          InvalidRequestError: one of its subclasses; then none is handed in.
        """
        now = self._clock.now()
        answers = [self._answer(self._requests.build_item(item, now)) for item in items]
        self._loop.submit(*answers)
        return [Pending(answer, self.cancel) for answer in answers]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece]:
        """Yield an answer piece by piece; leaving the loop early cancels the request."""
        return read(partial(self._start, prompt, params), self.cancel)

    async def agenerate(self, prompts: Any, params: Params = None) -> Any:
        """`generate` for asyncio; cancelling the task cancels its requests."""
        batch, single = as_batch(prompts)
        each = [only(params)] if single else for_each(params, len(batch))
        answers = self._submit_all(batch, each)
        running = [a for a in answers if isinstance(a, Answer)]
        try:
            await asyncio.gather(*(asyncio.wrap_future(a.future) for a in running))
        except asyncio.CancelledError:
            for answer in running:
                self.cancel(answer.request.id)
            raise
        done = [a.future.result() if isinstance(a, Answer) else a for a in answers]
        if single and done[0].error is not None:
            raise done[0].error
        return done[0] if single else done

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        return aread(partial(self._start, prompt, params), self.cancel)

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; one that has ended already is left alone."""
        self._loop.cancel(request_id)

    # ---- the runtime itself ----

    def stats(self) -> RuntimeStats:
        """A snapshot of the counters."""
        return RuntimeStats.of(
            self._engine.stats,
            self.config,
            num_compilations=self._executor.num_compilations,
            pool_bytes=self._pool_size.pool_bytes,
            weights_bytes=self._weights_bytes,
            step_bytes=self._pool_size.step_bytes,
        )

    def report(self) -> Report:
        """What happened so far: figures, a table, JSON, a trace, a picture."""
        return Report(
            self._engine.recorder.steps,
            self._engine.recorder.requests,
            policy=self._engine.scheduler.policy.name,
            num_pages=self.config.num_pages - 1,
        )

    def update_params(self, params: nnx.State, *, running: Running = "finish") -> None:
        """Serve other weights from here on, as a trainer has them after a step.

        Arrays that lie where the old ones do are shared and not copied, and nothing is compiled;
        others are moved there. The old ones are let go.

        Args:
          params: of the same structure, shapes and dtypes.
          running: what becomes of requests from before: "finish" waits until they have ended with
            the old weights, "abort" cancels them, "restart" lets them begin anew with the new
            ones. One that has shown tokens to a stream, or ended one of its samples, keeps its
            tokens and goes on with the new weights. Requests that come meanwhile wait.

        Raises:
          InvalidConfigError: the parameters do not fit.
          RuntimeClosedError, EngineFailedError
        """
        if running not in get_args(Running):
            raise InvalidConfigError(
                f"running={running!r} is unknown; give one of {get_args(Running)}"
            )
        placed = fitted(params, self._executor.params)
        with self._loop.paused(running):
            self._executor.update_params(placed)

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
          InvalidConfigError: not a size.
          RuntimeClosedError, EngineFailedError
        """
        kv_bytes = 0 if size == 0 else parse_bytes(size)
        with (
            out_of_memory_as("resizing the page pool", "give a smaller size"),
            self._loop.paused("keep"),
        ):
            pool = resized(self._executor, self._pool_size, kv_bytes)
            if pool.num_pages != self.config.num_pages:
                self._engine.resize(pool.num_pages)
                self._pool_size, self.config = pool, self._executor.config
                self._requests.max_prompt_tokens = self.config.max_prompt_tokens
                self._origin = replace(self._origin, config=self.config)
            if self.options.warmup and not self._executor.is_warm:
                warm_up(self._executor, progress=self.options.progress)
        return pool.pool_bytes

    def measure_step_times(self, *, rounds: int = 2) -> StepTimes:
        """Time every shape of step that this runtime has compiled, for `planning.simulate`.

        Waits until no request runs; those submitted meanwhile start afterwards. `rounds` repeat
        the whole measurement, and medians count.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        with self._loop.paused():
            return measure(
                self._executor,
                self._origin,
                self._clock,
                rounds=rounds,
                progress=self.options.progress,
            )

    def load_step_times(self, path: str | Path) -> StepTimes:
        """Step times that were measured on this model, device and configuration, and saved.

        Raises:
          InvalidProfileError: they were measured on another, or the file does not hold any.
        """
        return StepTimes.load(Path(path), expected=self._origin)

    def close(self) -> None:
        """Cancel what is left and free the page pool; parameters stay with who else holds them."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside ----

    def _run(
        self, batch: list[Any], params: Sequence[SamplingParams], progress: bool | None
    ) -> list[Completion]:
        answers = self._submit_all(batch, params)
        running = [a for a in answers if isinstance(a, Answer)]
        show = self.options.progress if progress is None else progress
        try:
            wait(running, progress=show)
        except KeyboardInterrupt:
            for answer in running:
                self.cancel(answer.request.id)
            wait(running, progress=False)
        return [a.future.result() if isinstance(a, Answer) else a for a in answers]

    def _submit_all(
        self, batch: list[Any], params: Sequence[SamplingParams]
    ) -> list[Answer | Completion]:
        """Requests that cannot be served become failed completions; the rest start together."""
        answers: list[Answer | Completion] = []
        for prompt, each in zip(batch, params, strict=True):
            now = self._clock.now()
            try:
                answers.append(self._answer(self._requests.build(prompt, each, now)))
            except InvalidRequestError as error:
                timing = Timing(arrival_s=now, finished_s=now)
                answers.append(failed_completion("refused", (), error, timing))
        self._loop.submit(*(a for a in answers if isinstance(a, Answer)))
        return answers

    def _start(self, prompt: Prompt, params: SamplingParams | None, sink: PieceSink) -> Answer:
        request = self._requests.build(prompt, params or SamplingParams(), self._clock.now())
        answer = self._answer(request, sink)
        self._loop.submit(answer)
        return answer

    def _answer(self, request: Request, sink: PieceSink | None = None) -> Answer:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return Answer(request, sink=sink)
        skip = request.params.skip_special_tokens
        return Answer(request, decoder=lambda: tokenizer.stream_decoder(skip), sink=sink)


def _shut_down(loop: EngineLoop, executor: DeviceExecutor, trace: TraceWriter | None) -> None:
    loop.close()
    executor.close()
    if trace is not None:
        trace.close()
