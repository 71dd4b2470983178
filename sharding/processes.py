"""The processes of a job: their start-up, the messages between them, and their common end."""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxserve.sharding.mesh import DeviceGroups
from jaxserve.sharding.progress import PendingStep, Progress, StepCounts, describe_behind

LEADER = 0
EXIT_LOST = 1
# A connection to a host that stopped responding fails after this long at the latest.
_SILENCE_S = 20
_PROBE_S = 5
# A JAX error may be the effect of another process's death; the leader then reports that first.
_OTHERS_FIRST_S = 2

COORDINATOR_VARIABLE = "JAXSERVE_COORDINATOR"
NUM_PROCESSES_VARIABLE = "JAXSERVE_NUM_PROCESSES"
PROCESS_ID_VARIABLE = "JAXSERVE_PROCESS_ID"
START_VARIABLE = "JAXSERVE_START_TIMEOUT"
HEARTBEAT_VARIABLE = "JAXSERVE_HEARTBEAT_TIMEOUT"
STEP_VARIABLE = "JAXSERVE_STEP_TIMEOUT"

# Launchers that JAX recognises (SLURM's srun, Open MPI) put the number of processes here.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# Processes end together, see `ProcessGroup.leave`; this bounds the wait for one that dies then.
_SHUTDOWN_S = 10
# JAX aborts the process at its time limit; ours comes first, with a line that says what to do.
_GRACE_S = 30
_ADDRESS_BYTES = 512
# A process that hangs in a step answers within this time how far it is; it looks once a second.
_ANSWER_S = 5.0
_LOOK_S = 1.0

# One per process, like `jax.distributed`.
_joined: ProcessGroup | None = None


class JoinError(RuntimeError):
    """The processes of a job cannot work together: one is missing, has left, or is in use."""


@final
@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits of a job in whole seconds, each at least 1.

    Attributes:
      start_s: until all processes have joined.
      heartbeat_s: until JAX gives a process up that sends no heartbeat: one that dies before it is
        connected, or hangs entirely.
      step_s: until devices that compute one step count as hung.
    """

    start_s: int = 120
    heartbeat_s: int = 25
    step_s: int = 600

    @classmethod
    def of(cls, environ: Mapping[str, str], **given_s: float | None) -> Timeouts:
        """Return the given ones, else those of the environment, else the defaults.

        Raises ValueError for one that is not a whole number of at least 1.
        """
        found: dict[str, int] = {}
        variables = {
            "start_s": START_VARIABLE,
            "heartbeat_s": HEARTBEAT_VARIABLE,
            "step_s": STEP_VARIABLE,
        }
        for name, variable in variables.items():
            value = given_s.get(name)
            if value is None:
                value = _whole(environ, variable)
            if value is None:
                continue
            if not 1 <= value < 1 << 31:
                what = name.removesuffix("_s")
                raise ValueError(
                    f"a {what} timeout of {value} s is not allowed; set at least 1, in {variable} "
                    f"or with --{what}-timeout"
                )
            found[name] = int(value)
        return cls(**found)


@final
@dataclass(frozen=True)
class _Message:
    """A message between processes.

    `work` and `report` carry content for the receiver's own code. `leave` and `fail` report that
    the sender is ready to end, or cannot continue. A follower whose devices hang sends `hang`. The
    leader then sends `ask`, and every follower answers with its `counts`.
    """

    kind: Literal["work", "report", "leave", "fail", "hang", "ask", "counts"]
    content: Any = None


@final
class ProcessGroup:
    """The processes of a job and this process's id among them. Process 0 is the leader.

    `join` makes the group. The leader has a connection to every follower, and a thread watches each
    connection. When another process dies or reports a failure, this process prints one line to
    stderr and exits with code 1 at once: its main thread may be waiting for that process inside a
    collective, where no exception could reach it.

    Args:
      connections: process id -> connection: every follower's on the leader, the leader's on a
        follower.
      hosts: process id -> host name, of the processes whose host is known.
      step_s: seconds until devices that compute one step count as hung, see `step`.
    """

    def __init__(
        self,
        process_id: int,
        num_processes: int,
        connections: Mapping[int, Connection],
        hosts: Mapping[int, str],
        step_s: float = Timeouts.step_s,
    ):
        self.process_id = process_id
        self.num_processes = num_processes
        self._connections = dict(connections)
        self._hosts = dict(hosts)
        self._step_s = step_s
        self._progress = Progress()
        self._counts: dict[int, StepCounts] = {}  # the last answers of the followers
        self._has_answer = threading.Condition()
        self._has_watch = False
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
        """The IP address at which the other processes reach this one."""
        addresses = map(_own_address, self._connections.values())
        # The leader may have followers on its own host and on other hosts.
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
        """Make this process's own `receive` return `content` next. Any thread; followers only."""
        self._inbox[LEADER].put(content)

    def report(self, content: Any) -> None:
        """Send `content`, which must be picklable, to the leader. Any thread; followers only."""
        self._tell(_Message("report", content))

    def next_report(self, peer: int, *, waits: bool) -> Any:
        """Return the next `report` of a follower, which is not None. Leader only.

        If none has come, wait for it, or return None with waits=False.
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

    def step(self) -> AbstractContextManager[PendingStep]:
        """Return a block that submits a step, see `Progress.step`. All processes count the same.

        If the devices of this process do not end it in time, the job ends, with a line that names
        the processes that are behind.
        """
        if not self._has_watch:
            self._has_watch = True
            threading.Thread(target=self._watch_steps, name="watch steps", daemon=True).start()
        return self._progress.step()

    def step_counts(self, wait_s: float) -> dict[int, StepCounts]:
        """Return how far each process is, of those that answer in time. Leader only."""
        with self._has_answer:
            self._counts = {LEADER: self._progress.counts()}
        lost = self._send(_Message("ask"))
        with self._has_answer:
            self._has_answer.wait_for(
                lambda: len(self._counts) + len(lost) >= self.num_processes, wait_s
            )
            return dict(self._counts)

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

        Raises JoinError if the group is in use, or a process has left.
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
        """Report that this process cannot continue: the other processes end, this one continues."""
        if not self._has_failed:
            self._has_failed = True
            self._send(_Message("fail", f"{self._name(self.process_id)} failed: {reason}"))

    # ---- the end ----

    def before_leaving(self, close: Callable[[], object]) -> None:
        """Register `close` to be called when this process ends, before the others are told."""
        self._closers.append(close)

    def leave(self) -> None:
        """Wait until all processes are ready to end; runs at interpreter exit.

        A failed process exits here with code 1, since JAX's own shutdown would wait for the others.
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
                elif message.kind == "ask":
                    self._send(_Message("counts", self._progress.counts()))
                elif message.kind == "counts":
                    with self._has_answer:
                        self._counts[peer] = message.content
                        self._has_answer.notify_all()
                elif message.kind == "hang":
                    # This thread reads the answer of the process that hangs.
                    threading.Thread(target=self._end_hung, daemon=True).start()
                else:
                    self._has_left[peer].set()
                    if self._needs_others:
                        self._end(f"{self._name(peer)} has left the job while it was needed")
        except (EOFError, OSError):
            if not self._has_left[peer].is_set():
                self._end(_died(self._name(peer)))
        except Exception as error:  # unpickling can raise anything, e.g. across versions
            self._end(f"a message from {self._name(peer)} cannot be read ({error!r})")

    def _watch_steps(self) -> None:
        while True:
            time.sleep(min(_LOOK_S, self._step_s))
            if self._progress.waiting_s() < self._step_s:
                continue
            if self.is_leader:
                self._end_hung()
                continue
            self._send(_Message("hang"))
            time.sleep(2 * _ANSWER_S)  # the leader ends this process meanwhile
            if self._progress.waiting_s() >= self._step_s:
                self._end(f"{self._hung}: {self._name(LEADER)} did not answer")

    def _end_hung(self) -> None:
        counts = self.step_counts(_ANSWER_S)
        behind = describe_behind(counts, self._name, self.num_processes)
        self._end(f"{self._hung}: {behind}")

    @property
    def _hung(self) -> str:
        return f"a step has not ended within {self._step_s:g} s ({STEP_VARIABLE} sets the limit)"

    def _end(self, reason: str) -> None:
        """Exit with one line on stderr that gives the reason; the leader ends the others too."""
        if self._has_failed:
            return  # it reports its own failure, which the others know
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


@final
@dataclass(frozen=True)
class _Place:
    """A process's place in its job; JAX reads the fields that are None from the launcher."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None

    def __str__(self) -> str:
        name = "this process" if self.process_id is None else f"process {self.process_id}"
        address = "" if self.coordinator is None else f" (coordinator {self.coordinator})"
        return f"{name} of {self.num_processes or 'several'}{address}"


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float | None = None,
    heartbeat_timeout_s: float | None = None,
    step_timeout_s: float | None = None,
) -> ProcessGroup | None:
    """Join this process to a job, and return when all of its processes have joined.

    Return None for a job of one process. An argument that is None is read from
    `JAXSERVE_COORDINATOR`, `JAXSERVE_NUM_PROCESSES` or `JAXSERVE_PROCESS_ID`, then from the
    launcher (SLURM's srun, Open MPI). If the script has called `jax.distributed.initialize` itself,
    the job consists of those processes. Call this before anything else that uses JAX; a second call
    returns the result of the first.

    From then on the end of one process ends all (`ProcessGroup`). A process that waits longer than
    the timeout prints one line to stderr and exits with code 1.

    Args:
      coordinator: host and free port on process 0, the same on all processes.
      process_id: from 0; process 0 is the leader.
      timeout_s, heartbeat_timeout_s, step_timeout_s: see `Timeouts`; by default those of
        `JAXSERVE_START_TIMEOUT`, `JAXSERVE_HEARTBEAT_TIMEOUT` and `JAXSERVE_STEP_TIMEOUT`.

    Raises:
      ValueError: a setting is missing or malformed, or settings contradict each other.
      JoinError: the processes could not connect.
    """
    global _joined
    if _joined is not None:
        if num_processes not in (None, _joined.num_processes) or (
            process_id not in (None, _joined.process_id)
        ):
            raise ValueError(
                f"this process has already joined as process {_joined.process_id} of "
                f"{_joined.num_processes}; it cannot join again with other numbers"
            )
        return _joined
    timeouts = Timeouts.of(
        os.environ, start_s=timeout_s, heartbeat_s=heartbeat_timeout_s, step_s=step_timeout_s
    )
    place = _place(coordinator, num_processes, process_id, os.environ)
    if place is None and not jax.distributed.is_initialized():
        return None
    place = place or _Place(None, None, None)
    with _within(timeouts.start_s, place):
        if not jax.distributed.is_initialized():
            _initialize(place, timeouts)
        if jax.process_count() == 1:
            return None
        with stdout_on_stderr():
            _joined = _connect(place.coordinator, timeouts.step_s)
    atexit.register(_joined.leave)  # runs before JAX's own handler, registered at its import
    return _joined


def group_over(mesh: Mesh | DeviceGroups | None) -> ProcessGroup | None:
    """Return the group of the processes that own a mesh's devices; None if this one owns all.

    Raises:
      ValueError: the mesh has devices of some, but not all, of the job's processes.
      JoinError: the processes could not connect, as in `join`.
    """
    if mesh is None or jax.process_count() == 1:
        return None
    if isinstance(mesh, DeviceGroups):
        name, on_mesh = f"mesh, {mesh},", {each for group in mesh.processes for each in group}
    else:
        name = f"mesh {dict(mesh.shape)}"
        on_mesh = {device.process_index for device in mesh.devices.flat}
    if on_mesh == {jax.process_index()}:
        return None
    left_out = sorted(set(range(jax.process_count())) - on_mesh)
    if left_out:
        raise ValueError(
            f"the {name} has no device of process(es) {left_out}. A model is "
            f"served by one process or by all of them: use a mesh of all {len(jax.devices())} "
            "devices, use a mesh of this process's own devices, or start fewer processes"
        )
    return join()


def _place(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environ: Mapping[str, str],
) -> _Place | None:
    """Return this process's place in its job; None for a job of one process."""
    if coordinator is None:
        coordinator = environ.get(COORDINATOR_VARIABLE)
    if num_processes is None:
        num_processes = _whole(environ, NUM_PROCESSES_VARIABLE)
    if process_id is None:
        process_id = _whole(environ, PROCESS_ID_VARIABLE)
    is_launched = any((_whole(environ, name) or 1) > 1 for name in _LAUNCHERS)
    if num_processes == 1 and process_id in (0, None):
        return None
    place = _Place(coordinator, num_processes, process_id)
    missing = [name for name, value in vars(place).items() if value is None]
    if len(missing) == 3 and not is_launched:
        return None
    if missing and not is_launched:
        raise ValueError(
            f"{', '.join(missing)} missing. A job of several processes needs coordinator "
            "(host:port of process 0), num_processes and process_id; pass them or set "
            f"{COORDINATOR_VARIABLE}, {NUM_PROCESSES_VARIABLE} and {PROCESS_ID_VARIABLE}"
        )
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"coordinator={coordinator!r} is not allowed; pass host:port")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes={num_processes} is not allowed; pass at least 1")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        raise ValueError(
            f"process_id={process_id} of num_processes={num_processes} is not allowed; ids go "
            "from 0 to num_processes - 1"
        )
    return place


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.strip().isdigit():
        raise ValueError(f"{name}={text!r} is not allowed; set a whole number")
    return int(text)


def _initialize(place: _Place, timeouts: Timeouts) -> None:
    # Its handler treats SIGTERM as a notice to save a checkpoint, and the process would not end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            initialization_timeout=timeouts.start_s + _GRACE_S,
            heartbeat_timeout_seconds=timeouts.heartbeat_s,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except RuntimeError as error:  # XLA's errors are of this class too
        raise JoinError(
            f"{place} could not join the others ({str(error).splitlines()[0]}); call "
            "sharding.join() before anything else that uses JAX, and choose a coordinator port "
            "that is free"
        ) from error


@contextmanager
def _within(timeout_s: float, place: _Place) -> Iterator[None]:
    """A block that ends the process after `timeout_s`: JAX, inside, would wait or abort."""

    def give_up() -> None:
        line = (
            f"jaxserve: {place} waited {timeout_s:g} s, but not all processes joined. Check that "
            "all were started with the same coordinator and number of processes, that they can "
            f"reach it, and what they printed; {START_VARIABLE} sets how long to wait.\n"
        )
        os.write(2, line.encode())
        os._exit(EXIT_LOST)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connect(coordinator: str | None, step_s: float) -> ProcessGroup:
    """Connect the leader with all followers; a broadcast over the devices sends its address."""
    process_id, num_processes = jax.process_index(), jax.process_count()
    own_host = socket.gethostname()
    host = own_host if coordinator is None else coordinator.rpartition(":")[0]
    if process_id != LEADER:
        host, port, key = _shared(None)
        try:
            connection = Client((host, port), authkey=key)
            connection.send((process_id, own_host))
            leader_host = connection.recv()
        except (OSError, EOFError, AuthenticationError) as error:
            raise JoinError(
                f"process {process_id} of {num_processes} cannot reach process 0 at {host}:{port} "
                f"({error}); use a coordinator address that it can reach, and open all ports "
                "between the hosts"
            ) from error
        return ProcessGroup(
            process_id,
            num_processes,
            {LEADER: connection},
            {LEADER: leader_host, process_id: own_host},
            step_s,
        )
    key = os.urandom(32)
    is_local = host in ("localhost", "127.0.0.1")
    with Listener(
        ("127.0.0.1" if is_local else "", 0), backlog=num_processes, authkey=key
    ) as listener:
        _shared((host, int(listener.address[1]), key))
        connections, hosts = _accept(listener, own_host, num_processes)
    hosts[LEADER] = own_host
    return ProcessGroup(process_id, num_processes, connections, hosts, step_s)


def _shared(address: tuple[str, int, bytes] | None) -> tuple[str, int, bytes]:
    """Return the leader's address and key on every process; followers pass None."""
    data = np.zeros(_ADDRESS_BYTES, np.uint8)
    if address is not None:
        pickled = pickle.dumps(address)
        data[: len(pickled)] = np.frombuffer(pickled, np.uint8)
    return pickle.loads(multihost_utils.broadcast_one_to_all(data).tobytes())


def _accept(
    listener: Listener, own_host: str, num_processes: int
) -> tuple[dict[int, Connection], dict[int, str]]:
    """Accept all followers, in any order, and return their connections and host names."""
    connections: dict[int, Connection] = {}
    hosts: dict[int, str] = {}
    while len(connections) < num_processes - 1:
        try:
            connection = listener.accept()
            peer, host = connection.recv()
            connection.send(own_host)
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # not a process of this job, or one that died: the start-up timeout ends it
        connections[peer], hosts[peer] = connection, host
    return connections, hosts
