"""The facade of replicas on Ray."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from flax import nnx
from tqdm import tqdm

from jaxserve.conversations import Conversations, Journal
from jaxserve.core.clock import WallClock
from jaxserve.core.errors import InvalidConfigError, UnknownAdapterError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion, check_id, deadline_at, drawn_seed
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import PieceSink, Weights
from jaxserve.engine.loop import Running, check_running
from jaxserve.engine.pending import Pending, PromptBatch
from jaxserve.engine.requests import Prompt
from jaxserve.execution.weights import check_usable
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.fleet.ray_replica import RayReplica, import_ray, sent_params
from jaxserve.fleet.replica import ReplicaState, Started, make_call
from jaxserve.fleet.seats import FleetUpdate
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import RuntimeStats, Service
from jaxserve.runtime.build import with_token_options
from jaxserve.runtime.turn_client import ServiceTurnClient
from jaxserve.runtime.weight_update import KV, WeightUpdate
from jaxserve.scheduling.presets import get_policy

# Arguments of `Runtime.from_pretrained` other than `RuntimeOptions`.
_LOADING = ("load", "dtype", "revision")
_OWN_IDS = "fleet-"


@final
class Fleet(Service):
    """A `Service` on Ray that serves one model in several processes, on one or several machines.

    Each replica is a `Runtime` in a Ray actor with its own devices. A request goes to the replica
    that probably has its prompt's pages, or to the one with the least work (`scheduling.router`). A
    replica that dies is replaced, and another replica answers its requests, once: only a request
    whose replica died twice has a `ReplicaDiedError`. A stream then continues after the tokens that
    it has yielded. Completions have the tokens of a single runtime with the same options, and times
    on their replica's clock.

    Histories of conversations are in this process. Each turn goes to the replica that answered the
    previous turns, or, if that has died, to another one with the same tokens.

    Args:
      model: a model as for `Runtime.from_pretrained`; a path must exist on every machine.
      replicas: number of replicas; 2 by default.
      roles: how many replicas compute prompts ("prefill") and how many answer ("decode"), each at
        least 1. KV of a prompt goes from one to the other through host memory and Ray's object
        store. By default every replica computes both.
      tensor_parallel: number of devices over which each replica splits the model.
      num_cpus, num_gpus: number that Ray reserves for each replica. By default `num_gpus` is
        `tensor_parallel`, or 0 if Ray has no GPUs.
      options: `load`, `dtype`, `revision`, and `RuntimeOptions` except `record` and `disk_memory`.
        The journal of `conversations` is in this process.

    An existing connection to Ray is used and not closed. Without one, the fleet joins the cluster
    of RAY_ADDRESS, or starts Ray on this machine; `close` leaves or stops it.

    After `close`, methods that need a replica raise `RuntimeClosedError`. Those that wait for
    replicas (`stats`, `update_params`, `pause`, `resume`) raise `InvalidRequestError` on the
    fleet's own thread.

    Raises:
      MissingExtraError: Ray is not installed.
      InvalidConfigError: an option is not allowed, Ray has too few CPUs or GPUs, or `roles` are
        given and the replicas have no host memory for KV, as with recurrent layers.
      ReplicaDiedError: a replica died several times in a row while it was loading.
      ModelError, DownloadError, ModelCacheError, DeviceMemoryError
      JournalError: the journal of conversations cannot be used.
    """

    recovers = True  # a replica that fails is replaced

    def __init__(
        self,
        model: str,
        *,
        replicas: int | None = None,
        roles: Mapping[str, int] | None = None,
        tensor_parallel: int = 1,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        **options: Any,
    ):
        num_prefill, num_replicas = numbers_of(replicas, roles)
        counts = {"replicas": num_replicas, "tensor_parallel": tensor_parallel}
        if roles is not None:
            counts["roles['prefill']"] = num_prefill
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfigError(f"{name}={value!r}; pass a whole number of at least 1")
        self.options = RuntimeOptions.parse(
            {name: value for name, value in options.items() if name not in _LOADING}
        )
        if roles is not None:
            check_sends_kv(self.options)
        get_policy(self.options.policy)
        if self.options.record is not None:
            raise InvalidConfigError(
                f"record={str(self.options.record)!r}: a fleet does not record; use a Runtime, or "
                "omit record"
            )
        if self.options.disk_memory is not None:
            raise InvalidConfigError(
                f"disk_memory={self.options.disk_memory!r}: the replicas of a fleet would write to "
                "one folder; use a Runtime, or omit disk_memory"
            )
        if self.options.max_adapters:
            raise InvalidConfigError(
                f"max_adapters={self.options.max_adapters!r}: the replicas of a fleet load no "
                "adapters; use a Runtime, or omit max_adapters"
            )
        for name in ("progress", "conversations", "journal_limits"):
            options.pop(name, None)
        ray = import_ray()
        self._model = model
        self._conversations: Conversations | None = None
        self._tokenizer: Tokenizer | None = None
        self._has_read_tokenizer = False
        self._reading = threading.RLock()  # guards reading the tokenizer, then the conversations
        self._clock = WallClock()
        self._numbers = itertools.count()
        left_behind = ExitStack()
        # Closes a fleet that is dropped without `close`.
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
                each = {"CPU": num_cpus, "GPU": num_gpus}
                check_resources(resources, num_replicas + num_prefill, each)
            make_replica = partial(
                RayReplica,
                model,
                tensor_parallel=tensor_parallel,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                options=options,
            )
            self._dispatcher = Dispatcher(
                make_replica,
                num_replicas,
                page_size=self.options.page_size,
                num_prefill=num_prefill,
            )
            left_behind.callback(self._dispatcher.close)
            self._started = self._wait_for_replicas()
            self.model_config = self._started[0].model_config
            if roles is not None:
                check_host_pages(self._started[num_replicas:], self._started[:num_replicas])
        except BaseException:
            self.close()
            raise

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """The current state of each replica."""
        return self._dispatcher.replicas

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, which is read on this machine at the first access.

        Raises:
          ModelError, DownloadError, ModelCacheError
        """
        from jaxserve.models.store import load_tokenizer

        with self._reading:
            if not self._has_read_tokenizer:
                found = load_tokenizer(self._model, progress=self.options.progress)
                size = self.model_config.vocab_size
                self._tokenizer, _ = with_token_options(found, None, self.options, size)
                self._has_read_tokenizer = True
            return self._tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """Empty: replicas of a fleet load no adapters."""
        return ()

    def load_adapter(self, name: str, source: Any, *, scale: float | None = None) -> None:
        """Raise InvalidConfigError: replicas of a fleet load no adapters."""
        raise InvalidConfigError(
            f"adapter {name!r}: replicas on Ray load no adapters; serve them with a Runtime"
        )

    def drop_adapter(self, name: str) -> None:
        """Raise UnknownAdapterError: replicas of a fleet load no adapters."""
        raise UnknownAdapterError(
            f"adapter {name!r} is not loaded: replicas on Ray load no adapters; serve them with a "
            "Runtime"
        )

    @property
    def max_length(self) -> int:
        return min(started.max_length for started in self._started)

    @property
    def conversations(self) -> Conversations:
        """The stored conversations; `conversation` opens one.

        Raises:
          ModelError, DownloadError, ModelCacheError: the tokenizer cannot be read.
        """
        with self._reading:
            if self._conversations is None:
                most = min(started.max_prompt_tokens for started in self._started)
                client = ServiceTurnClient(
                    self.submit,
                    check_may_wait=self._check_may_wait,
                    max_prompt_tokens=lambda: most,
                    progress=self.options.progress,
                )
                self._conversations = Conversations(
                    self._journal, client, self.tokenizer, self.vocab_size
                )
            return self._conversations

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
    ) -> Pending[Completion]:
        """Submit one request, and return at once; see `Service.submit`.

        Each replica orders only its own requests by priorities and deadlines. A request that cannot
        be served gets a completion with the error.

        Raises:
          InvalidRequestError: the id or deadline is not allowed, or a request with this id is still
            running.
        """
        check_id(request_id, _OWN_IDS)
        deadline_at_s = deadline_at(deadline_s, self._clock.now())
        number = next(self._numbers)
        params = params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=drawn_seed(self.options.seed, number))
        call = make_call(
            f"{_OWN_IDS}{number}" if request_id is None else request_id,
            prompt,
            params,
            priority=priority,
            page_size=self.options.page_size,
            deadline_s=deadline_at_s,
            conversation_id=conversation_id,
        )
        return Pending(call.id, self._dispatcher.submit(call, on_piece), self.cancel)

    def cancel(self, request_id: str) -> None:
        self._dispatcher.cancel(request_id)

    def is_ready(self) -> bool:
        """Return whether an answering replica serves, which it does after it has compiled."""
        return self._dispatcher.is_serving

    def stats(self, *, wait: bool = True) -> RuntimeStats:
        """Return the total counters of all processes so far; see `RuntimeStats`.

        Of a process that has died, the counters at the last call are included, so that none gets
        lower; sizes and pages are those of the processes that serve now. Raise `ReplicaDiedError`
        if no replica will serve again, or if none serves now and `wait` is False.
        """
        return self._dispatcher.stats(wait=wait)

    @property
    def weights_version(self) -> int:
        """The version of the newest weights; 0 for those that the fleet has loaded."""
        return self._dispatcher.weights_version

    def update_params(
        self,
        params: nnx.State | str | Path,
        *,
        version: int | None = None,
        running: Running | None = None,
        kv: KV = "recompute",
        partial: bool = False,
        max_staleness: int | None = None,
    ) -> int:
        """Replace the weights of every replica, for instance with those of a trainer.

        Arrays go to Ray's object store once, from where every replica reads them, and stay there
        until later ones have replaced them. Every replica first loads the new weights next to its
        old ones. If one cannot, none uses them. When all have loaded them, each switches to them as
        `Runtime.update_params` does. A replica that fails or dies now is replaced by a process that
        starts with the new weights, and so is one that dies later. Until the call returns, some
        replicas may answer with the old weights and some with the new ones; each token has its
        version. Ctrl-C ends the wait and not the update. `docs/promises/rollouts.md` says what is
        guaranteed.

        Args:
          params: parameters of this process, of the same structure and shapes; or a model's folder
            or file with the same configuration, as for `Fleet`, which each replica loads.
          version: number of the new weights, above the current one; by default the next number.
          running: treatment of the requests that were submitted before; "keep" by default while the
            fleet is paused, and "finish" otherwise. See `Runtime.update_params`.
          kv, max_staleness: see `Runtime.update_params`.
          partial: whether `params` lacks the parameters that have not changed; not with a path.

        Returns:
          The version of the new weights, which every replica has.

        Raises:
          InvalidParamsError: the parameters do not fit, or have NaN or infinite numbers, or Ray
            cannot hold them.
          ModelError: the folder or file cannot be loaded.
          InvalidConfigError: another argument is not allowed.
          DeviceMemoryError: a replica has no room for both the new and the old ones.
          EngineBusyError: running="finish" while the fleet is paused.
          ReplicaDiedError: every replica died while switching to the new weights, which none uses;
            or no replica will serve again.
        """
        dispatcher = self._dispatcher
        dispatcher.check_may_wait()
        if running is None:
            running = "keep" if dispatcher.is_paused else "finish"
        settings = WeightUpdate(
            version=version, running=running, kv=kv, partial=partial, max_staleness=max_staleness
        )
        settings.after(Weights(dispatcher.weights_version))  # before anything is sent
        if isinstance(params, (str, Path)):
            if partial:
                raise InvalidConfigError(
                    f"partial=True with the path {os.fspath(params)!r} is not allowed, because a "
                    "folder has all parameters; pass an nnx.State of those that have changed"
                )
            return dispatcher.update_params(
                FleetUpdate(source=os.fspath(params), paths=None, settings=settings)
            )
        check_usable(params)
        paths = frozenset(path for path, _ in nnx.to_flat_state(params))
        return dispatcher.update_params(
            FleetUpdate(source=sent_params(params), paths=paths, settings=settings)
        )

    def pause(self, running: Running = "keep") -> None:
        """Run no step on any replica until `resume`; see `Runtime.pause`.

        Requests are accepted meanwhile, and wait. A process that replaces a replica is paused too.

        Raises:
          InvalidConfigError: `running` is unknown.
          EngineBusyError: running="finish" while the fleet is paused.
        """
        check_running(running)
        self._dispatcher.pause(running)

    def resume(self) -> None:
        """Run steps again after `pause`; do nothing without a pause."""
        self._dispatcher.resume()

    def close(self) -> None:
        """Cancel every request that has not ended, and end every replica's process."""
        self._finalizer()

    def _check_may_wait(self) -> None:
        self._dispatcher.check_may_wait()

    def _submit_batch(self, batch: PromptBatch) -> list[Pending[Completion]]:
        return list(map(self.submit, batch.prompts, batch.params))

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


def numbers_of(replicas: int | None, roles: Mapping[str, int] | None) -> tuple[int, int]:
    """Return the numbers of replicas that only prefill, and of those that answer."""
    if roles is None:
        return 0, 2 if replicas is None else replicas
    if set(roles) != {"prefill", "decode"} or replicas is not None:
        raise InvalidConfigError(
            f"roles={dict(roles)!r} with replicas={replicas} is not allowed; pass roles={{'prefill'"
            ": 1, 'decode': 1}, or other numbers of both, without replicas"
        )
    return roles["prefill"], roles["decode"]


def check_sends_kv(options: RuntimeOptions) -> None:
    """Raise InvalidConfigError if replicas with these options cannot send KV."""
    policy = get_policy(options.policy)
    keeps = policy.retention.keeps_pages and policy.retention.uses_host
    if policy.is_planned or not keeps or options.host_memory == 0:
        raise InvalidConfigError(
            f"policy={policy.name!r} with host_memory={options.host_memory!r} keeps no pages of "
            "prompts on the host, from where replicas with roles send them, or plans by itself; "
            'pass policy="auto" or "pensieve", with host memory'
        )
    if options.learns:
        raise InvalidConfigError(
            "learns=True is not allowed with roles, because prefill replicas see answers of one "
            "token; omit one or the other"
        )


def check_resources(has: dict[str, float], replicas: int, each: dict[str, float]) -> None:
    """Raise InvalidConfigError if Ray has less of a resource than `replicas` times `each`."""
    for name, wanted in each.items():
        if wanted * replicas > has.get(name, 0):
            raise InvalidConfigError(
                f"{replicas} replicas with {wanted:g} {name}s each need {wanted * replicas:g}, but "
                f"Ray has {has.get(name, 0):g}; lower replicas or num_{name.lower()}s, or connect "
                "to a larger cluster first (ray.init)"
            )


def check_host_pages(prefilling: Sequence[Started], decoding: Sequence[Started]) -> None:
    """Raise InvalidConfigError if replicas that prefill cannot send KV to those that decode."""
    for role, started in {"prefill": prefilling, "decode": decoding}.items():
        if not any(each.num_host_pages for each in started):
            raise InvalidConfigError(
                f"no {role!r} replica has pages of host memory, through which KV goes from one to "
                "another, so every prompt would be computed twice; those of models with recurrent "
                "layers are not sent, so omit roles for them, and pass a larger host_memory for "
                "others"
            )
