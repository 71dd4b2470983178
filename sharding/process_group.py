"""The processes of one job as each of them sees them: connected, so that none outlives another."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, final

import jax

LEADER = 0
EXIT_LOST = 1
# A host that vanished without a word is noticed after this long at the latest.
_SILENCE_S = 20
_PROBE_S = 5
_OTHERS_FIRST_S = 2


class JoinError(RuntimeError):
    """Processes that cannot work together: they did not come together, or are not all free."""


@final
@dataclass(frozen=True)
class _Message:
    """`work` is for the process's own code, the others are about the process that sends them."""

    kind: Literal["work", "leave", "fail"]
    content: Any = None


@final
class ProcessGroup:
    """The processes of a job and this one's place among them. Process 0 leads.

    The leader is connected with every other process, and a thread watches each connection. Where
    another process ends without a word, or reports that it failed, this one prints one line to
    stderr and ends with exit code 1, whatever it was doing: its main thread may be waiting for
    that process inside a collective, where no exception could reach it.

    `join` makes it.

    Args:
      connections: process id -> connection; of all others on the leader, else of the leader.
      hosts: process id -> name of its host; of as many processes as are known.
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

    # ---- what the processes tell one another ----

    def broadcast(self, content: Any) -> None:
        """Leader: send to every other process; anything that can be pickled."""
        self._tell(_Message("work", content))

    def receive(self) -> Any:
        """Follower: wait for what the leader sends next."""
        return self._inbox[LEADER].get()

    def all_gather(self, value: Any) -> list[Any]:
        """Every process's value, by process id; all processes must call it, in the same order."""
        if not self.is_leader:
            self._tell(_Message("work", value))
            return self.receive()
        values = [value, *(self._inbox[peer].get() for peer in range(1, self.num_processes))]
        self.broadcast(values)
        return values

    # ---- together or not at all ----

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """A block that ends the other processes when it fails."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                # Perhaps only because another process died: then its end is what to tell, and the
                # leader, which notices it at once, ends this process meanwhile.
                time.sleep(_OTHERS_FIRST_S)
            self.fail(f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes go through, waiting for one another; none can leave in it."""
        before = self._needs_others
        self._needs_others = True
        try:
            with self.reporting_failure(), stdout_on_stderr():
                self._check_complete()
                yield
        finally:
            self._needs_others = before

    def claim(self) -> None:
        """Take the group for one use, until `release`; on the leader, the others must stay.

        Raises:
          JoinError: it is taken, or a process has left already.
        """
        if self._is_claimed:
            raise JoinError(
                "these processes serve a model together already; close that runtime first"
            )
        self._check_complete()
        self._is_claimed = True
        self._needs_others = self.is_leader

    def release(self) -> None:
        """End the use that `claim` began."""
        self._is_claimed = self._needs_others = False

    def fail(self, reason: str) -> None:
        """Tell the other processes that this one cannot go on; they end, this one is left to."""
        if not self._has_failed:
            self._has_failed = True
            self._send(_Message("fail", f"{self._name(self.process_id)} failed: {reason}"))

    # ---- the end ----

    def before_leaving(self, close: Callable[[], object]) -> None:
        """Call `close` when this process ends, before it says so to the others."""
        self._closers.append(close)

    def leave(self) -> None:
        """Wait until all processes want to end; for the end of the interpreter.

        A process that failed ends here, with exit code 1: JAX's own end would wait for the others.
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

    # ---- inside ----

    def _check_complete(self) -> None:
        for peer, left in self._has_left.items():
            if left.is_set():
                raise JoinError(f"{self._name(peer)} has left the job; start all anew")

    def _send(self, message: _Message) -> list[int]:
        """Send to every connected process; returns those that cannot be reached."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        lost = []
        for peer, connection in self._connections.items():
            try:
                with self._sending:
                    connection.send_bytes(data)
            except OSError:
                lost.append(peer)
        return lost

    def _tell(self, message: _Message) -> None:
        for peer in self._send(message):
            self._end(_died(self._name(peer)))

    def _watch(self, peer: int) -> None:
        try:
            while True:
                message: _Message = pickle.loads(self._connections[peer].recv_bytes())
                if message.kind == "work":
                    self._inbox[peer].put(message.content)
                elif message.kind == "fail":
                    self._end(message.content)
                else:
                    self._has_left[peer].set()
                    if self._needs_others:
                        self._end(f"{self._name(peer)} has left the job while it was needed")
        except (EOFError, OSError):
            if not self._has_left[peer].is_set():
                self._end(_died(self._name(peer)))
        except Exception as error:  # whatever reading what another version sent provokes
            self._end(f"what {self._name(peer)} sent cannot be read ({error!r})")

    def _end(self, reason: str) -> None:
        """End this process with one line that says why, and on the leader all the others."""
        if self._has_failed:
            return  # it says itself why it ends, and the others heard of it
        self._ending.acquire()  # never given back: the first reason counts
        line = (
            f"jaxserve: {reason}. So {self._name(self.process_id)} ends too, and what was under "
            "way is lost. Look at what that process printed last, then start all processes again.\n"
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
    """Gloo greets on stdout before a first collective of devices; answers belong there alone."""
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


def _notice_silence(connection: Connection) -> None:
    """Let the kernel give up a connection whose other host does not answer, and send at once."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S // _PROBE_S - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
