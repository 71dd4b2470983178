"""The facade of replicas on Ray."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self, final, overload

from tqdm import tqdm

from jaxserve.conversations import Conversation, Conversations, Journal
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion, drawn_seed
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.requests import Prompt
from jaxserve.fleet.asker import FleetAsker
from jaxserve.fleet.call import make_call
from jaxserve.fleet.dispatcher import Dispatcher, ReplicaState
from jaxserve.fleet.ray_replica import RayReplica, import_ray
from jaxserve.fleet.replica import Started
from jaxserve.runtime.batches import Batch, Params
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.streams import aread, read
from jaxserve.scheduling.presets import get_policy

# Of `Runtime.from_pretrained`, beside the runtime's own options.
_LOADING = ("load", "dtype")


@final
class Fleet:
    """Serves one model from several processes, on one machine or many, by way of Ray.

    Each replica is a `Runtime` in a Ray actor with devices of its own. A request goes where its
    prompt's pages probably are, or to the least work (`scheduling.router`). A replica that dies is
    replaced; what it was answering is answered by another, once. Answers are those of a single
    runtime with the same options. Thread-safe; use as a context manager or `close` it.

    Args:
      model: as `Runtime.from_pretrained` takes it; a path must be there on every machine.
      replicas: how many.
      tensor_parallel: devices that each replica splits the model over.
      num_cpus, num_gpus: that Ray sets aside for each replica; GPUs by default as many as it
        splits the model over, or none where Ray has none.
      options: `load`, `dtype`, and those of `RuntimeOptions`, but for `record` and `disk_memory`.
        The journal of `conversations` is this process's.

    An existing connection to Ray is used and left as it was. Without one, the cluster of
    RAY_ADDRESS is joined or a Ray on this machine started, and left or ended by `close`.

    Raises:
      MissingExtraError: Ray is not installed.
      InvalidConfigError: also when Ray has not enough CPUs or GPUs.
      ReplicaDiedError: a replica died time and again while it was loading.
      ModelError, DownloadError, ModelCacheError, DeviceMemoryError
      JournalError: the journal of conversations cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        replicas: int = 2,
        tensor_parallel: int = 1,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        **options: Any,
    ):
        for name, value in (("replicas", replicas), ("tensor_parallel", tensor_parallel)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfigError(f"{name}={value!r}; give a whole number of at least 1")
        self.options = RuntimeOptions.parse(
            {name: value for name, value in options.items() if name not in _LOADING}
        )
        get_policy(self.options.policy)
        if self.options.record is not None:
            raise InvalidConfigError("record= is for one Runtime; a fleet does not record")
        if self.options.disk_memory is not None:
            raise InvalidConfigError(
                "disk_memory= is for one Runtime; the replicas of a fleet would write to one folder"
            )
        for name in ("progress", "conversations", "journal_limits"):
            options.pop(name, None)
        ray = import_ray()
        self._model = model
        self._conversations: Conversations | None = None
        self._one_opening = threading.Lock()
        self._numbers = itertools.count()
        left_behind = ExitStack()
        # Also for fleets that are dropped without `close`.
        self._finalizer = weakref.finalize(self, left_behind.close)
        try:
            self._journal = Journal(self.options.conversations, self.options.journal_limits)
            left_behind.callback(self._journal.close)
            is_ours = not ray.is_initialized()
            if is_ours:
                ray.init(include_dashboard=False, logging_level=logging.WARNING)
                left_behind.callback(ray.shutdown)
            resources = ray.cluster_resources()
            if num_gpus is None:
                num_gpus = tensor_parallel if resources.get("GPU", 0) else 0
            if is_ours:
                check_resources(resources, replicas, {"CPU": num_cpus, "GPU": num_gpus})
            make_replica = partial(
                RayReplica,
                model,
                tensor_parallel=tensor_parallel,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                options=options,
            )
            self._dispatcher = Dispatcher(make_replica, replicas, page_size=self.options.page_size)
            left_behind.callback(self._dispatcher.close)
            self._started = self._wait_for_replicas()
        except BaseException:
            self.close()
            raise

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """How each replica stands now."""
        return self._dispatcher.replicas

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
        """Answer one prompt, or a batch of them in their order, as `Runtime.generate` does.

        Times in a completion are on its replica's clock. One whose replicas died twice, and only
        that one, has a `ReplicaDiedError`.
        """
        batch = Batch.of(prompts, params)
        show = self.options.progress if progress is None else progress
        return batch.wait(self._submit_batch(batch), progress=show)

    async def agenerate(self, prompts: Any, params: Params = None) -> Any:
        """`generate` for asyncio; cancelling the task cancels its requests."""
        batch = Batch.of(prompts, params)
        return await batch.await_(self._submit_batch(batch))

    @property
    def conversations(self) -> Conversations:
        """Those that are kept; `conversation` opens one.

        The first time, it reads the model's tokenizer on this machine.

        Raises:
          ModelError, DownloadError, ModelCacheError
        """
        with self._one_opening:
            if self._conversations is None:
                self._conversations = self._open_conversations()
            return self._conversations

    def conversation(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Begin a conversation, or go on with one, as `Runtime.conversation` does.

        `send` and `stream` of it ask and remember. Its history is in this process, so that it
        outlives any replica: each turn goes where the turns before were answered, and after a
        death elsewhere, with the same tokens.

        Raises:
          InvalidConfigError, InvalidRequestError, OtherModelError, JournalError: as there.
          RuntimeClosedError
          ModelError, DownloadError, ModelCacheError: the tokenizer cannot be read.
        """
        return self.conversations.open(id, system=system, messages=messages)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        conversation_id: str | None = None,
        on_piece: PieceSink | None = None,
    ) -> Pending:
        """Hand in one request and return at once; its completion also says what is wrong with it.

        Args:
          priority: higher goes first under a priority order, on its replica.
          conversation_id: whose turn this is, where you keep the history yourself; see
            `conversation`.
          on_piece: gets what `stream` would yield, on the fleet's thread, which must not wait.

        Raises:
          RuntimeClosedError
        """
        number = next(self._numbers)
        params = params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=drawn_seed(self.options.seed, number))
        call = make_call(
            f"fleet-{number}",
            prompt,
            params,
            priority=priority,
            page_size=self.options.page_size,
            conversation_id=conversation_id,
        )
        return Pending(call.id, self._dispatcher.submit(call, on_piece), self.cancel)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece]:
        """Yield an answer piece by piece; leaving the loop early cancels the request.

        When its replica dies, it goes on where another has come as far: no token comes twice.
        """
        params = params or SamplingParams()
        return read(lambda sink: self.submit(prompt, params, on_piece=sink), params.n)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        params = params or SamplingParams()
        return aread(lambda sink: self.submit(prompt, params, on_piece=sink), params.n)

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; one that has ended already is left alone."""
        self._dispatcher.cancel(request_id)

    def close(self) -> None:
        """End what is left, and every replica's process."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit_batch(self, batch: Batch) -> list[Pending]:
        return list(map(self.submit, batch.prompts, batch.params))

    def _open_conversations(self) -> Conversations:
        from jaxserve.models.store import load_tokenizer

        asker = FleetAsker(
            self.submit,
            max_prompt_tokens=min(started.max_prompt_tokens for started in self._started),
            progress=self.options.progress,
        )
        tokenizer = load_tokenizer(self._model, progress=self.options.progress)
        return Conversations(self._journal, asker, tokenizer, self._started[0].vocab_size)

    def _wait_for_replicas(self) -> list[Started]:
        starting = self._dispatcher.start()
        with tqdm(
            total=len(starting),
            desc="starting replicas",
            leave=False,
            delay=2,
            disable=not self.options.progress,
        ) as bar:
            for started in as_completed(starting):
                started.result()
                bar.update()
        return [started.result() for started in starting]


def check_resources(has: dict[str, float], replicas: int, each: dict[str, float]) -> None:
    """Raise InvalidConfigError if `replicas` times `each` is more than there is of a resource."""
    for name, wanted in each.items():
        if wanted * replicas > has.get(name, 0):
            raise InvalidConfigError(
                f"{replicas} replicas with {wanted:g} {name}s each need {wanted * replicas:g}, and "
                f"Ray has {has.get(name, 0):g}; lower replicas or num_{name.lower()}s, or connect "
                "to a larger cluster first (ray.init)"
            )
