"""A replica in a Ray actor: its process, and how the fleet's process reaches it."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeGuard, final

import jax
import numpy as np
from flax import nnx

from jaxserve.core.clock import WallClock
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineFailedError,
    InvalidConfigError,
    InvalidParamsError,
    InvalidRequestError,
    JaxserveError,
    MissingExtraError,
    ReplicaDiedError,
    RuntimeClosedError,
    StepMemoryError,
)
from jaxserve.core.options import parse_dtype
from jaxserve.core.request import Completion, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink, failed_completion
from jaxserve.engine.loop import Running
from jaxserve.engine.pending import Pending, submitted
from jaxserve.fleet.replica import ReplicaCall, Started, cancelled_completion
from jaxserve.runtime.loading import load_weights, panels_of
from jaxserve.runtime.weight_update import PreparedParams, WeightUpdate
from jaxserve.scheduling.kv.transfer import KVPages

if TYPE_CHECKING:
    from jaxserve.models.store import LoadedModel
    from jaxserve.runtime import Runtime, RuntimeStats


# Arrays by their paths in the model's state.
HostArrays: TypeAlias = Mapping[tuple[Any, ...], np.ndarray]

_log = logging.getLogger(__name__)

# Seconds between two checks of which pages of a prompt have been computed: the least, after a
# check that found pages, and the most. They double while there are none, as while a prompt waits.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.01, 0.32

# Seconds between checks whether a new runtime has compiled what a first request needs.
_READY_POLL_S = 0.05

# Errors after which a runtime can answer no further request; for a completion, see `is_over`.
FATAL = (EngineFailedError, DeviceMemoryError, RuntimeClosedError)
# Errors of a runtime whose loop has failed or was closed.
OVER = (EngineFailedError, RuntimeClosedError)

# Maximum number of concurrent requests of one actor. Ray queues further ones.
_MAX_OPEN = 4096


def host_arrays(params: nnx.State) -> HostArrays:
    """Return parameters as arrays in this process's memory.

    Raise `InvalidParamsError` if a part of an array is in other processes.
    """
    flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    for path, array in flat.items():
        if isinstance(array, jax.Array) and not (
            array.is_fully_addressable or array.is_fully_replicated
        ):
            raise InvalidParamsError(
                f"the parameter {'.'.join(map(str, path))} is spread over several processes, and a "
                "fleet takes parameters from one; gather them there, or save them and pass the path"
            )
    return {path: np.asarray(array) for path, array in flat.items()}


def state_of(arrays: HostArrays) -> nnx.State:
    """Return the state from which `host_arrays` were made, without metadata."""
    return nnx.from_flat_state([(path, nnx.Param(array)) for path, array in arrays.items()])


def check_same_model(path: str, found: Any, served: Any) -> None:
    """Raise InvalidParamsError unless two configurations of models are the same."""
    if type(found) is not type(served):
        raise InvalidParamsError(
            f"{path} is a {type(found).__name__}, and this fleet serves a {type(served).__name__}; "
            "pass weights of the served model"
        )
    wanted = asdict(served)
    other = [name for name, value in asdict(found).items() if value != wanted[name]]
    if other:
        raise InvalidParamsError(
            f"the configuration of {path} has another {', '.join(other)} than the served model; "
            "pass weights of the served model"
        )


class Asked(TypedDict):
    request_id: str
    priority: int
    deadline_s: float | None
    conversation_id: str | None


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "fleet", "running replicas on Ray") from error
    return ray


async def take_kv(runtime: Runtime, kv: Sequence[Awaitable[tuple[Sequence[int], KVPages]]]) -> None:
    """Cache the KV of a prompt, which arrived in parts; raise if the runtime's loop is over.

    A part that cannot be read or cached, and all later parts, are computed; the log says why.
    """
    pages: list[bytes] = []
    identity, tokens = None, ()
    try:
        for each in kv:
            tokens, found = await each
            if identity not in (None, found.identity):
                break  # the weights were changed meanwhile
            identity = found.identity
            pages += found.pages
    except Exception as error:  # lost
        _log.warning("KV of a prompt is not used, and is computed again: %s", error)
    if identity is None:
        return
    try:
        await asyncio.to_thread(runtime.import_kv, tokens, KVPages(identity, pages))
    except OVER:
        raise
    except Exception as error:  # of other weights, or no memory for it
        _log.warning("KV of a prompt is not used, and is computed again: %s", error)


async def send_kv(
    runtime: Runtime,
    tokens: Sequence[int],
    pending: Pending[Completion],
    put: Callable[[KVPages], Any],
    turn: asyncio.Lock,
) -> tuple[list[Any], int]:
    """Export the pages of a prompt in chunks, while the request `pending` computes it.

    `put` sends pages and returns a reference; it is called on other threads. `turn` is held while
    the runtime is asked for pages, so that many prompts ask one after another and take little of
    its time. Return the references in the order of the pages, and the number of pages.
    """
    sent: list[Any] = []
    first, ended, pause_s = 0, asyncio.wrap_future(pending.future), _LEAST_PAUSE_S
    while not pending.future.done():
        async with turn:
            found = await asyncio.to_thread(runtime.export_kv, tokens, first, waits=False)
        if found.pages:
            sent.append(await asyncio.to_thread(put, found))
            first += len(found.pages)
        pause_s = _LEAST_PAUSE_S if found.pages else min(2 * pause_s, _MOST_PAUSE_S)
        await asyncio.wait([ended], timeout=pause_s)
    return sent, first


@final
class ReplicaActor:
    """A runtime in a process of Ray. Its methods run in one event loop."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._load: Callable[[str], LoadedModel] | None = None
        self._prepared: PreparedParams | None = None
        # Requests that are being submitted, and which of them were cancelled meanwhile.
        self._submitting: dict[str, bool] = {}
        self._exporting = asyncio.Lock()

    async def start(self, model: str, tensor_parallel: int, options: Mapping[str, Any]) -> Started:
        from jaxserve.runtime import Runtime
        from jaxserve.sharding import make_mesh

        try:
            mesh = None if tensor_parallel == 1 else make_mesh(tensor=tensor_parallel)
        except ValueError as error:
            raise InvalidConfigError(
                f"{error}; or give each replica {tensor_parallel} GPUs (num_gpus)"
            ) from error
        runtime = self._runtime = Runtime.from_pretrained(
            model, mesh=mesh, progress=False, **options
        )
        while not runtime.is_ready():
            await asyncio.sleep(_READY_POLL_S)
        dtype = parse_dtype(options.get("dtype"))
        panels = panels_of(runtime.options, model, dtype, mesh)
        self._load = partial(load_weights, runtime.options, dtype=dtype, mesh=mesh, panels=panels)
        config = runtime.config
        return Started(
            pid=os.getpid(),
            host=platform.node(),
            max_context=config.max_context,
            max_length=runtime.max_length,
            max_prompt_tokens=config.max_prompt_tokens,
            model_config=runtime.model_config,
            # Pages without the states of recurrent layers are not sent.
            num_host_pages=0 if config.has_slot_state else config.num_host_pages,
        )

    async def prefill(self, prompt: Any, others: Asked) -> list[Any]:
        """Compute a prompt, and put the KV of its full pages into Ray's object store.

        Pages go there while the rest of the prompt is computed, and are used only if it succeeds.
        The references are in a list, so that Ray copies the KV only to the process that reads it;
        the list is empty without KV.
        """
        runtime, ray = self._runtime, import_ray()
        assert runtime is not None
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        pending = await self._submit(prompt, one, others)
        sent: list[Any] = []
        try:
            tokens = () if pending.future.done() else runtime.prompt_tokens(prompt)
            sent, first = await send_kv(
                runtime, tokens, pending, lambda kv: ray.put((tokens, kv)), self._exporting
            )
            completion = await pending.aresult()
            if completion.finish_reason == "length":
                tokens = completion.prompt_token_ids
                last = await asyncio.to_thread(runtime.export_kv, tokens, first)
                sent += [ray.put((tokens, last))] if last.pages else []
        except OVER:
            raise
        except Exception as error:  # such as a full store, or no memory for the copies
            _log.warning("KV of a prompt is not sent, and is computed again: %s", error)
            completion = await pending.aresult()
        if is_over(completion.error):
            raise completion.error
        return sent if completion.finish_reason == "length" else []

    async def take(self, kv: list[Any]) -> None:
        """Cache the KV of a prompt that another replica has computed, if Ray still has it."""
        assert self._runtime is not None
        await take_kv(self._runtime, kv)

    async def answer(self, prompt: Any, params: SamplingParams, others: Asked) -> Completion:
        return await (await self._submit(prompt, params, others)).aresult()

    async def stream(
        self, prompt: Any, params: SamplingParams, others: Asked
    ) -> AsyncGenerator[Piece | Completion]:
        news: asyncio.Queue[Piece | Completion] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(latest: Piece | Completion) -> None:
            loop.call_soon_threadsafe(news.put_nowait, latest)

        pending = await self._submit(prompt, params, others, put)
        pending.future.add_done_callback(lambda future: put(future.result()))
        while not isinstance(latest := await news.get(), Completion):
            yield latest
        yield latest

    async def _submit(
        self, prompt: Any, params: SamplingParams, others: Asked, on_piece: PieceSink | None = None
    ) -> Pending[Completion]:
        runtime = self._runtime
        assert runtime is not None
        id = others["request_id"]
        self._submitting[id] = False
        try:
            (pending,) = await submitted(
                lambda: [runtime.submit(prompt, params, on_piece=on_piece, **others)], [params]
            )
            if self._submitting[id]:
                pending.cancel()
            return pending
        except (InvalidRequestError, MissingExtraError) as error:
            now = WallClock().now()
            timing = Timing(arrival_s=now, finished_s=now)
            return Pending.ended(failed_completion(id, (), error, timing))
        finally:
            del self._submitting[id]

    async def stats(self) -> RuntimeStats:
        assert self._runtime is not None
        return self._runtime.stats()

    async def prepare_params(self, source: str | list[Any], is_partial: bool) -> None:
        """Load weights from a path, or from a list of a reference to `HostArrays`."""
        await self.drop_prepared()
        self._prepared = await asyncio.to_thread(self._prepare, source, is_partial)

    def _prepare(self, source: str | list[Any], is_partial: bool) -> PreparedParams:
        assert self._runtime is not None and self._load is not None
        try:
            if isinstance(source, str):
                loaded = self._load(source)
                check_same_model(source, loaded.config, self._runtime.model_config)
                params = loaded.params
            else:
                params = state_of(import_ray().get(source[0]))
            return self._runtime.prepare_params(params, partial=is_partial)
        except JaxserveError:
            raise
        except Exception as error:  # such as arrays that Ray has lost
            raise InvalidParamsError(
                f"a replica cannot take these weights ({type(error).__name__}: {error}); the "
                "present ones go on serving"
            ) from error

    async def drop_prepared(self) -> None:
        self._prepared = None

    async def update_params(self, update: WeightUpdate) -> None:
        assert self._runtime is not None and self._prepared is not None
        prepared, self._prepared = self._prepared, None
        await asyncio.to_thread(
            self._runtime.update_params,
            prepared,
            version=update.version,
            running=update.running,
            kv=update.kv,
            max_staleness=update.max_staleness,
        )

    async def pause(self, running: Running) -> None:
        assert self._runtime is not None
        await asyncio.to_thread(self._runtime.pause, running)

    async def resume(self) -> None:
        assert self._runtime is not None
        await asyncio.to_thread(self._runtime.resume)

    async def cancel(self, request_id: str) -> None:
        if request_id in self._submitting:
            self._submitting[request_id] = True
        elif self._runtime is not None:
            self._runtime.cancel(request_id)


def is_over(error: JaxserveError | None) -> TypeGuard[JaxserveError]:
    """Return whether a completion's error says that its runtime can answer nothing more."""
    return isinstance(error, FATAL) and not isinstance(error, StepMemoryError)


@final
class RayReplica:
    """A `ReplicaProcess` in a Ray actor: Ray assigns devices, moves data and detects deaths.

    The actor's machine reads the model's files. The model is split over `tensor_parallel` of the
    actor's devices; Ray reserves `num_cpus` and `num_gpus` for the actor.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel: int,
        num_cpus: float,
        num_gpus: float,
        options: Mapping[str, Any],
    ):
        self._ray = import_ray()
        self._how = (model, tensor_parallel, dict(options))
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._actor: Any = None
        # Requests whose KV is being sent to the actor, which does not know them yet; and which of
        # them were cancelled meanwhile.
        self._taking: dict[str, bool] = {}

    async def start(self) -> Started:
        make = self._ray.remote(max_restarts=0, max_concurrency=_MAX_OPEN, **self._resources)
        self._actor = make(ReplicaActor).remote()
        return await self._result(self._actor.start.remote(*self._how))

    async def prefill(self, call: ReplicaCall) -> Any:
        reply = self._sent(self._actor.prefill, call.prompt, _asked(call))
        try:
            return await self._result(reply)
        except FATAL as error:
            raise _useless(error) from error

    async def answer(
        self, call: ReplicaCall, on_piece: PieceSink | None = None, kv: Any = None
    ) -> Completion:
        method = self._actor.answer if on_piece is None else self._actor.stream
        try:
            if kv and not await self._has_taken(call, kv):
                return cancelled_completion(call, arrival_s=WallClock().now())
            reply = self._sent(method, call.prompt, call.params, _asked(call))
            completion = await (
                self._result(reply) if on_piece is None else self._streamed(reply, on_piece)
            )
        except FATAL as error:
            raise _useless(error) from error
        if is_over(completion.error):
            raise _useless(completion.error) from completion.error
        return completion

    async def _has_taken(self, call: ReplicaCall, kv: list[Any]) -> bool:
        """Send KV to the actor, then free it in Ray; return False if the request was cancelled."""
        self._taking[call.id] = False
        try:
            await self._result(self._actor.take.remote(kv))
        finally:
            is_cancelled = self._taking.pop(call.id)
            kv.clear()
        return not is_cancelled

    def _sent(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the actor with a prompt among its arguments."""
        try:
            return method.remote(*arguments)
        except TypeError as error:
            raise InvalidRequestError(
                f"the prompt cannot be sent to a replica: {error}; pass a string, token ids or "
                "chat messages"
            ) from error

    async def stats(self) -> RuntimeStats:
        return await self._result(self._actor.stats.remote())

    async def prepare_params(self, source: Any, *, partial: bool) -> None:
        """Implement `ReplicaProcess`; `source` is a path, or what `sent_params` has returned."""
        await self._changed(self._actor.prepare_params.remote(source, partial))

    async def drop_prepared(self) -> None:
        await self._changed(self._actor.drop_prepared.remote())

    async def update_params(self, update: WeightUpdate) -> None:
        await self._changed(self._actor.update_params.remote(update))

    async def pause(self, running: Running) -> None:
        await self._changed(self._actor.pause.remote(running))

    async def resume(self) -> None:
        await self._changed(self._actor.resume.remote())

    async def _changed(self, reply: Awaitable[Any]) -> None:
        """Wait for a change of the runtime, which serves as before after an error."""
        try:
            await self._result(reply)
        except OVER as error:
            raise _useless(error) from error

    def cancel(self, request_id: str) -> None:
        if request_id in self._taking:
            self._taking[request_id] = True
        elif self._actor is not None:
            self._actor.cancel.remote(request_id)

    def kill(self) -> None:
        if self._actor is not None and self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(self._actor, no_restart=True)

    async def _streamed(self, replies: AsyncIterator[Any], on_piece: PieceSink) -> Completion:
        """Call `on_piece` with the pieces, and return the completion that follows them."""
        while True:
            latest = await self._result(await self._result(anext(replies)))
            if isinstance(latest, Completion):
                return latest
            on_piece(latest)

    async def _result(self, reply: Awaitable[Any]) -> Any:
        """Return what a method of the actor returns, or raise the error that it raises."""
        failures = self._ray.exceptions
        try:
            return await reply
        except failures.RayTaskError as error:
            if isinstance(error.cause, JaxserveError):
                raise error.cause from error
            raise EngineFailedError(f"a replica failed: {error}") from error
        except failures.RayError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ReplicaDiedError(reason) from error


def sent_params(params: nnx.State) -> list[Any]:
    """Put parameters into Ray's object store, from where every replica reads them.

    The reference is in a list, so that each replica reads the arrays itself. Raise
    `InvalidParamsError` if Ray cannot hold them, or a part of an array is in other processes.
    """
    ray = import_ray()
    arrays = host_arrays(params)
    try:
        return [ray.put(arrays)]
    except ray.exceptions.RayError as error:
        num_bytes = sum(array.nbytes for array in arrays.values())
        raise InvalidParamsError(
            f"Ray cannot hold parameters of {num_bytes} bytes ({error}); pass a larger "
            "object_store_memory to ray.init, or save them and pass the path"
        ) from error


def _asked(call: ReplicaCall) -> Asked:
    deadline_s = call.deadline_s
    return Asked(
        request_id=call.id,
        priority=call.priority,
        # The process has another clock.
        deadline_s=None if deadline_s is None else deadline_s - WallClock().now(),
        conversation_id=call.conversation_id,
    )


def _useless(error: JaxserveError) -> ReplicaDiedError:
    return ReplicaDiedError(f"its runtime failed with {type(error).__name__}: {error}")
