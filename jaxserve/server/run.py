"""The server process: it listens at once, loads the model meanwhile, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.core.errors import InvalidConfigError
from jaxserve.runtime import Service
from jaxserve.server.app import make_app
from jaxserve.server.backend import Backend, OutlookOf
from jaxserve.server.options import ServerOptions, check_names, url_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


_log = logging.getLogger(__name__)

Opened = tuple[Service, OutlookOf | None]

if sys.platform != "win32":
    import resource

if sys.platform == "linux":
    # Seconds of silence before a probe, seconds between probes, number of probes. TCP_USER_TIMEOUT
    # is not set: it would end connections whose clients pause reading.
    _KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that a service has to close after a second signal.
_CLOSE_S = 1.0
# Seconds between checks for a second signal while the service is closed.
_SIGNAL_POLL_S = 0.05
# Seconds between checks whether the service has compiled what a first request needs.
_READY_POLL_S = 0.05
# Open files of a process other than its connections.
_NUM_OTHER_FILES = 512
# Bytes of the head of a request.
_MAX_HEAD_BYTES = 64 << 10
# Seconds after which a thread yields the interpreter to a waiting one; the default is 5 ms, for
# which the event loop would wait while the engine's thread plans a step.
_SWITCH_S = 0.0005


class TimedProtocol(H11Protocol):
    """A connection that is closed if the head of a request takes too long.

    A client that sends nothing, or a byte now and then, cannot keep connections open.
    """

    header_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_timeout(cls, header_timeout_s: float) -> type[TimedProtocol]:
        """Return the protocol with this limit; uvicorn makes an object for each connection."""
        return type("TimedProtocol", (cls,), {"header_timeout_s": header_timeout_s})

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        """Whether the head of a request has arrived, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()


@final
class _Server(uvicorn.Server):
    """A server that drains at the first call of `end` and ends at the second.

    `is_hurried` says whether `end` was called twice, also when the loop is over.
    """

    def __init__(self, config: uvicorn.Config, backend: Backend, on_drain: Callable[[int], None]):
        super().__init__(config)
        self._on_drain = on_drain
        self.backend = backend
        self.has_begun = threading.Event()
        self.is_hurried = False
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.has_begun.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.force_exit:
            self._abort()
        await super().shutdown(sockets)
        # Clients that have not read their answers would delay the end of the loop.
        self._abort_connections()
        await asyncio.sleep(0)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # `serve` handles the signals, since the service is closed after uvicorn has released them.
        # uvicorn would also raise them again, and the process would end as if it had been killed.
        yield

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call on the event loop; do nothing if the server has ended."""
        self.has_begun.wait()
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    def end(self) -> None:
        """Drain, and then end; at the second call, end at once. May be called on any thread."""
        self.is_hurried, self._is_ending = self._is_ending, True
        if self._loop is None:
            self.should_exit = True
        else:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._draining is None and self.backend.phase == "ready":
            self.backend.drain()
            self._on_drain(self.backend.num_waiting + self.backend.num_running)
            self._draining = asyncio.ensure_future(self._exit_when_idle())
        else:
            self._abort()

    def _abort(self) -> None:
        self.force_exit = self.should_exit = True
        self._abort_connections()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _exit_when_idle(self) -> None:
        limit_s, begun_s = self.backend.options.drain_timeout_s, time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await self.backend.until_idle()
        except TimeoutError:
            _log.warning("the time to drain is over; open requests are cancelled")
            self._abort()
        if limit_s is not None:
            # Clients that have not read their answers yet have the rest of the time.
            left_s: Any = max(0.0, begun_s + limit_s - time.monotonic())
            self.config.timeout_graceful_shutdown = left_s
        self.should_exit = True


def listen(options: ServerOptions) -> socket.socket:
    """Return a listening socket; raise InvalidConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidConfigError(
            f"{options.host}:{options.port} cannot be used: {_reason(error)}; pass "
            "another --host or --port"
        ) from error
    # Connections inherit these options. A client whose machine or network is gone is noticed within
    # about a minute if it has acknowledged all data, and else when TCP stops retransmitting, after
    # about 15 minutes; without them, a silent client would be noticed only after hours.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for name, value in _KEEP_ALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, name, value)
    return listener


def _reason(error: OSError) -> str:
    """Return the system's message, without the address that `socket` adds."""
    return (error.strerror or str(error)).partition(" (while ")[0]


def _allow_connections(options: ServerOptions) -> None:
    """Raise the process's limit of open files to what the connections need, as far as allowed.

    Beyond that limit a connection would be neither accepted nor refused.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = options.max_connections + _NUM_OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "max_connections=%d, and this process may have %d open files; raise its hard limit "
            "(ulimit -Hn, LimitNOFILE=) or lower --max-connections",
            options.max_connections,
            most,
        )


def _server(
    options: ServerOptions,
    traces: TracerProvider | None,
    on_drain: Callable[[int], None] = lambda _: None,
) -> _Server:
    _allow_connections(options)
    backend = Backend(options)
    config = uvicorn.Config(
        make_app(backend, traces),
        http=TimedProtocol.with_timeout(options.header_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # uvicorn refuses at this number of connections, including the current one.
        limit_concurrency=options.max_connections + 1,
        timeout_keep_alive=int(max(1, options.keep_alive_s)),
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
    return _Server(config, backend, on_drain)


def serve(
    options: ServerOptions,
    open_service: Callable[[], Opened],
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_drain: Callable[[int], None] = lambda _: None,
    traces: TracerProvider | None = None,
) -> bool:
    """Serve until SIGINT or SIGTERM. Call it on the main thread.

    The server listens at once. It accepts requests when `open_service` has returned, and `/ready`
    says 503 until they would not wait for a compilation (`Service.is_ready`). The first signal lets
    accepted requests end. The second cancels them, and waits at most a second for the service to
    close. The caller's handlers of both signals are restored on return.

    Args:
      open_service: returns the service, which is closed at the end, and its `outlook` if it has
        one (see `Backend.serve`); called on another thread.
      listener: socket to listen on, from `listen`.
      on_ready: called when `/ready` says 200 for the first time.
      on_drain: called after the first signal, with the number of open requests.
      traces: exports a span of each request that generates; None for no traces.

    Returns:
      Whether the service is closed. After a second signal it may still be closing, or, if the
      signal came early, loading, which includes compilations that nothing can interrupt; the caller
      should then end the process with `os._exit`.

    Raises:
      InvalidConfigError: the address cannot be used.
      JaxserveError: the service cannot be created; raised by `open_service`.
    """
    server = _server(options, traces, on_drain)
    listener = listener or listen(options)
    loading = _Loading(server, open_service, on_ready)
    with _signals_end(server), _quick_turns():
        try:
            loading.start()
            server.run(sockets=[listener])
        finally:
            listener.close()
            is_closed = loading.close()
    return is_closed


@contextmanager
def _signals_end(server: _Server) -> Iterator[None]:
    before = {sig: signal.signal(sig, lambda *_: server.end()) for sig in _SIGNALS}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Shorten the interpreter's switch interval within the block."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


@contextmanager
def running(
    service: Service,
    options: ServerOptions,
    *,
    outlook: OutlookOf | None = None,
    traces: TracerProvider | None = None,
) -> Iterator[str]:
    """Serve a service on a thread within the block, and yield the address ("http://...").

    For tests and notebooks. At the end of the block, accepted requests end; the service stays open.
    `outlook` is as in `Backend.serve`, `traces` as in `serve`.

    Raises:
      InvalidConfigError: the address cannot be used.
    """
    server = _server(options, traces)
    listener = listen(options)
    thread = threading.Thread(
        target=server.run, args=([listener],), name="jaxserve-server", daemon=True
    )
    thread.start()
    try:
        _publish(server, service, outlook)
        with _quick_turns():
            yield url_of(options.host, listener.getsockname()[1])
    finally:
        server.end()
        thread.join()
        listener.close()


def _publish(server: _Server, service: Service, outlook: OutlookOf | None) -> None:
    """Let the server answer with a service, from the event loop's next iteration on."""
    check_names(server.backend.options.model_name, service.adapters)
    # A fleet reads its tokenizer at the first access, which may take seconds.
    _ = service.tokenizer
    service.is_ready()  # start loading the executables that an earlier start has stored
    server.post(server.backend.serve, service, service.max_length, outlook)


@final
class _Loading:
    """A thread that creates the service while the server already listens."""

    def __init__(
        self, server: _Server, open_service: Callable[[], Opened], on_ready: Callable[[], None]
    ):
        self._server = server
        self._open_service = open_service
        self._on_ready = on_ready
        self._service: Service | None = None
        self._error: BaseException | None = None
        # A daemon: loading cannot be interrupted, and a signal has to end the process.
        self._thread = threading.Thread(target=self._run, name="jaxserve-loading", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Close the service, or raise the error that prevented it; return whether all is done.

        Once the server is hurried, this waits `_CLOSE_S` seconds more. It does not wait for a
        service that is still being created.
        """
        closing = threading.Thread(target=self._close, name="jaxserve-closing", daemon=True)
        closing.start()
        while closing.is_alive() and not (self._server.is_hurried or self._server.force_exit):
            closing.join(_SIGNAL_POLL_S)
        closing.join(_CLOSE_S)
        if self._error is not None:
            raise self._error
        return not (closing.is_alive() or self._thread.is_alive())

    def _close(self) -> None:
        try:
            if self._service is not None:
                self._service.close()
                self._thread.join()  # it only checks whether the service is ready
        except BaseException as error:
            self._error = error

    def _run(self) -> None:
        try:
            self._service, outlook = self._open_service()
            _publish(self._server, self._service, outlook)
            while not (self._service.is_ready() or self._server.should_exit):
                time.sleep(_READY_POLL_S)
            if not self._server.should_exit:
                self._on_ready()
        except BaseException as error:
            self._error = error
            self._server.post(self._server.backend.fail)
            self._server.end()
