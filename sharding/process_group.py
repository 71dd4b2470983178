"""A process's view of its job: connections to the other processes, and a common end."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, final

import jax

LEADER = 0
EXIT_LOST = 1
# A connection to a host that stopped responding fails after this long at the latest.
_SILENCE_S = 20
_PROBE_S = 5
# A JAX error may be the effect of another process's death; the leader then reports that first.
_OTHERS_FIRST_S = 2


class JoinError(RuntimeError):
    """The processes of a job cannot work together: one is missing, has left, or is in use."""


@final
@dataclass(frozen=True)
class _Message:
    """A message between processes.

    `work` and `report` carry content for the receiver's own code. `leave` and `fail` report that
    the sender wants to end, or cannot continue.
    """

    kind: Literal["work", "report", "leave", "fail"]
    content: Any = None


@final
class ProcessGroup:
    """The processes of a job and this process's id among them. Process 0 is the leader.

    The leader has a connection to every follower, and a thread watches each connection. When
    another process dies or reports a failure, this process prints one line to stderr and exits
    with code 1 at once: its main thread may be waiting for that process inside a collective,
    where no exception could reach it.

    `join` makes the group.

    Args:
      connections: process id -> connection: every follower's on the leader, the leader's on a
        follower.
      hosts: process id -> host name, of the processes whose host is known.
    """

    def __init__(
        self,
        process_id: int,
        num_processes: int,
        connections: Mapping[int, Connection],
        hosts: Mapping[int, str],
    ):
        self.process_id = process_id
        self.num_processes = num_processes
        self._connections = dict(connections)
        self._hosts = dict(hosts)
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._inbox: dict[int, queue.SimpleQueue[Any]] = {
            peer: queue.SimpleQueue() for peer in connections
        }
        self._reports: dict[int, queue.SimpleQueue[Any]] = {
            peer: queue.SimpleQueue() for peer in connections
        }
        self._has_left = {peer: threading.Event() for peer in connections}
        self._is_claimed = False
        self._needs_others = False
        self._has_failed = False
        self._closers: list[Callable[[], object]] = []
        for peer, connection in self._connections.items():
            _notice_silence(connection)
            threading.Thread(
                target=self._watch, args=(peer,), name=f"watch process {peer}", daemon=True
            ).start()

    @property
    def is_leader(self) -> bool:
        return self.process_id == LEADER

    @property
    def address(self) -> str:
        """The IP address at which the others reach this process."""
        addresses = map(_own_address, self._connections.values())
        # The leader may have followers on its own host and on others.
        return max(addresses, key=lambda address: not address.startswith("127."))

    # ---- messages ----

    def broadcast(self, content: Any) -> None:
        """Send `content`, which must be picklable, to every follower. Leader only."""
        self._tell(_Message("work", content))

    def send(self, content: Any, process_ids: Collection[int]) -> None:
        """Send `content`, as `broadcast` does, to these followers only. Leader only."""
        self._tell(_Message("work", content), process_ids)

    def receive(self) -> Any:
        """Wait for the next content that the leader has sent, and return it. Followers only."""
        return self._inbox[LEADER].get()

    def remind(self, content: Any) -> None:
        """Have this process's own `receive` return `content` next. Any thread; followers only."""
        self._inbox[LEADER].put(content)

    def report(self, content: Any) -> None:
        """Send `content`, which must be picklable, to the leader. Any thread; followers only."""
        self._tell(_Message("report", content))

    def next_report(self, peer: int, *, waits: bool) -> Any:
        """Return the next `report` of a follower, which is not None. Leader only.

        Args:
          waits: wait for it; else None is returned where none has come.
        """
        try:
            return self._reports[peer].get(block=waits)
        except queue.Empty:
            return None

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, by process id. All processes call it, in the same order."""
        if not self.is_leader:
            self._tell(_Message("work", value))
            return self.receive()
        values = [value, *(self._inbox[peer].get() for peer in range(1, self.num_processes))]
        self.broadcast(values)
        return values

    # ---- common failure ----

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """A block whose failure ends the other processes too."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                # Another process may have died and caused this error. The leader notices that at
                # once and ends this process with the true reason during this wait.
                time.sleep(_OTHERS_FIRST_S)
            self.fail(f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes run, with collectives inside; none may leave during it."""
        before = self._needs_others
        self._needs_others = True
        try:
            with self.reporting_failure(), stdout_on_stderr():
                self._check_complete()
                yield
        finally:
            self._needs_others = before

    def claim(self) -> None:
        """Reserve the group for one use, until `release`. Followers of a claimed group must stay.

        Raises:
          JoinError: the group is in use, or a process has left.
        """
        if self._is_claimed:
            raise JoinError(
                "these processes already serve a model together; close that runtime first"
            )
        self._check_complete()
        self._is_claimed = True
        self._needs_others = self.is_leader

    def let_go(self) -> None:
        """Let followers leave from now on, before the use ends. Leader only."""
        self._needs_others = False

    def release(self) -> None:
        """End the use that `claim` began."""
        self._is_claimed = self._needs_others = False

    def fail(self, reason: str) -> None:
        """Report that this process cannot continue: the other processes end, this one goes on."""
        if not self._has_failed:
            self._has_failed = True
            self._send(_Message("fail", f"{self._name(self.process_id)} failed: {reason}"))

    # ---- the end ----

    def before_leaving(self, close: Callable[[], object]) -> None:
        """Register `close` to be called when this process ends, before the others are told."""
        self._closers.append(close)

    def leave(self) -> None:
        """Wait until all processes want to end; runs at interpreter exit.

        A process that failed exits here with code 1, since JAX's own shutdown would wait for the
        others.
        """
        for close in reversed(self._closers):
            close()
        if self._has_failed:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(EXIT_LOST)
        self._needs_others = False
        self._tell(_Message("leave"))
        for left in self._has_left.values():
            left.wait()

    # ---- internals ----

    def _check_complete(self) -> None:
        for peer, left in self._has_left.items():
            if left.is_set():
                raise JoinError(f"{self._name(peer)} has left the job; restart all processes")

    def _send(self, message: _Message, peers: Collection[int] | None = None) -> list[int]:
        """Send to connected processes, by default to all; return the ids of unreachable ones."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        lost = []
        for peer in self._connections if peers is None else peers:
            try:
                with self._sending:
                    self._connections[peer].send_bytes(data)
            except OSError:
                lost.append(peer)
        return lost

    def _tell(self, message: _Message, peers: Collection[int] | None = None) -> None:
        for peer in self._send(message, peers):
            self._end(_died(self._name(peer)))

    def _watch(self, peer: int) -> None:
        try:
            while True:
                message: _Message = pickle.loads(self._connections[peer].recv_bytes())
                if message.kind == "work":
                    self._inbox[peer].put(message.content)
                elif message.kind == "report":
                    self._reports[peer].put(message.content)
                elif message.kind == "fail":
                    self._end(message.content)
                else:
                    self._has_left[peer].set()
                    if self._needs_others:
                        self._end(f"{self._name(peer)} has left the job while it was needed")
        except (EOFError, OSError):
            if not self._has_left[peer].is_set():
                self._end(_died(self._name(peer)))
        except Exception as error:  # unpickling can raise anything, e.g. across versions
            self._end(f"a message from {self._name(peer)} cannot be read ({error!r})")

    def _end(self, reason: str) -> None:
        """Exit with one line on stderr that gives the reason; the leader ends the others too."""
        if self._has_failed:
            return  # it reports its own failure, and the others know of it
        self._ending.acquire()  # never released: only the first reason is printed
        line = (
            f"jaxserve: {reason}, so {self._name(self.process_id)} ends too and unfinished work is "
            "lost. Read the last lines that the failed process printed, then start all processes "
            "again.\n"
        )
        with suppress(OSError):
            os.write(2, line.encode())
        if self.is_leader:
            warn = threading.Thread(
                target=self._send, args=(_Message("fail", reason),), daemon=True
            )
            warn.start()
            warn.join(timeout=1)
        os._exit(EXIT_LOST)

    def _name(self, process_id: int) -> str:
        role = " (the leader)" if process_id == LEADER else ""
        host = f" on {self._hosts[process_id]}" if process_id in self._hosts else ""
        return f"process {process_id} of {self.num_processes}{role}{host}"


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send stdout to stderr inside the block: Gloo prints a line before its first collective."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _died(name: str) -> str:
    return f"{name} has died, or its host cannot be reached"


def _own_address(connection: Connection) -> str:
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        return sock.getsockname()[0]


def _notice_silence(connection: Connection) -> None:
    """Make the kernel close a connection whose peer is silent, and send without delay."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S // _PROBE_S - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
