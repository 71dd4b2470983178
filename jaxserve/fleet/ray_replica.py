"""The replica that runs in a Ray actor, as the fleet's process sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from flax import nnx

from jaxserve.core.clock import WallClock
from jaxserve.core.errors import (
    EngineFailedError,
    InvalidParamsError,
    InvalidRequestError,
    JaxserveError,
    ReplicaDiedError,
)
from jaxserve.core.request import Completion
from jaxserve.engine.answers import PieceSink
from jaxserve.engine.device_loop import Running
from jaxserve.fleet.call import Call, cancelled_completion
from jaxserve.fleet.params import host_arrays
from jaxserve.fleet.ray_actor import FATAL, OVER, Asked, ReplicaActor, import_ray, is_over
from jaxserve.fleet.replica import Started
from jaxserve.runtime.weight_update import WeightUpdate

if TYPE_CHECKING:
    from jaxserve.runtime import RuntimeStats

# Maximum number of concurrent requests of one actor. Ray queues the others.
_MAX_OPEN = 4096


@final
class RayReplica:
    """A `Replica` in a Ray actor: Ray assigns devices, moves data and detects deaths.

    Args:
      model, options: see `Runtime.from_pretrained`; files are read on the actor's machine.
      tensor_parallel: number of the actor's devices over which the model is split.
      num_cpus, num_gpus: number that Ray reserves for the actor.
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
        # Requests whose KV is on its way to the actor, which does not know them yet; and which of
        # them were cancelled meanwhile.
        self._taking: dict[str, bool] = {}

    async def start(self) -> Started:
        make = self._ray.remote(max_restarts=0, max_concurrency=_MAX_OPEN, **self._resources)
        self._actor = make(ReplicaActor).remote()
        return await self._result(self._actor.start.remote(*self._how))

    async def prefill(self, call: Call) -> Any:
        reply = self._sent(self._actor.prefill, call.prompt, _asked(call))
        try:
            return await self._result(reply)
        except FATAL as error:
            raise _useless(error) from error

    async def answer(
        self, call: Call, on_piece: PieceSink | None = None, kv: Any = None
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

    async def _has_taken(self, call: Call, kv: list[Any]) -> bool:
        """Have the actor take KV, which Ray frees then; False if the request was cancelled."""
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
        """See `Replica`.

        Args:
          source: a path, or what `sent_params` has returned.
        """
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

    Returns:
      A reference, in a list, so that each replica reads the arrays itself.

    Raises:
      InvalidParamsError: Ray cannot hold them, or a part of an array is in other processes.
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


def _asked(call: Call) -> Asked:
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
