"""Start-up of one job over several processes, on one host or many."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from sharding.process_group import (
    EXIT_LOST,
    LEADER,
    JoinError,
    ProcessGroup,
    stdout_on_stderr,
)

COORDINATOR_VARIABLE = "JAXSERVE_COORDINATOR"
NUM_PROCESSES_VARIABLE = "JAXSERVE_NUM_PROCESSES"
PROCESS_ID_VARIABLE = "JAXSERVE_PROCESS_ID"
TIMEOUT_VARIABLE = "JAXSERVE_START_TIMEOUT"
DEFAULT_TIMEOUT_S = 120

# Where a launcher that JAX recognises says how many processes it started: SLURM's srun, Open MPI.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# JAX's own watch: for processes that die before they are connected, or hang as a whole.
_HEARTBEAT_S = 25
# Processes end together, see `ProcessGroup.leave`; this bounds the wait for one that dies then.
_SHUTDOWN_S = 10
# JAX aborts the process when it has waited too long; ours comes first, and says what to do.
_GRACE_S = 30
_ADDRESS_BYTES = 512

# One a process, as `jax.distributed` is.
_joined: ProcessGroup | None = None


@final
@dataclass(frozen=True)
class _Place:
    """Of this process in its job; None is for JAX to find out from the launcher."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None

    def __str__(self) -> str:
        who = "this process" if self.process_id is None else f"process {self.process_id}"
        where = "" if self.coordinator is None else f" (coordinator {self.coordinator})"
        return f"{who} of {self.num_processes or 'several'}{where}"


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float | None = None,
) -> ProcessGroup | None:
    """Make this process one of a job's; returns when all have come, and None for a job of one.

    What is not given is taken from `JAXSERVE_COORDINATOR`, `JAXSERVE_NUM_PROCESSES` and
    `JAXSERVE_PROCESS_ID`, then from the launcher (SLURM's srun, Open MPI). Where the script has
    called `jax.distributed.initialize` itself, its processes are taken as they are. Call it before
    anything else that uses JAX; a second call returns what the first one did.

    Afterwards the processes live and die together, see `ProcessGroup`. One that waits for the
    others in vain prints a line to stderr and ends with exit code 1.

    Args:
      coordinator: host and port, a free one, of process 0; the same for all.
      process_id: from 0; process 0 leads.
      timeout_s: how long to wait for the others; by default `JAXSERVE_START_TIMEOUT`, or 120.

    Raises:
      ValueError: settings that are missing, malformed or contradict each other.
      JoinError: the processes did not come together.
    """
    global _joined
    if _joined is not None:
        if num_processes not in (None, _joined.num_processes) or (
            process_id not in (None, _joined.process_id)
        ):
            raise ValueError(
                f"this process has joined already, as process {_joined.process_id} of "
                f"{_joined.num_processes}; it cannot join again with other numbers"
            )
        return _joined
    wait_s = _timeout(timeout_s)
    place = _place(coordinator, num_processes, process_id, os.environ)
    if place is None and not jax.distributed.is_initialized():
        return None
    place = place or _Place(None, None, None)
    with _within(wait_s, place):
        if not jax.distributed.is_initialized():
            _initialize(place, wait_s)
        if jax.process_count() == 1:
            return None
        with stdout_on_stderr():
            _joined = _connect(place.coordinator)
    atexit.register(_joined.leave)  # runs before JAX's own end, registered at its import
    return _joined


def group_over(mesh: Mesh | None) -> ProcessGroup | None:
    """The processes that a mesh's devices belong to; None where all are this process's own.

    Raises:
      ValueError: the mesh leaves out some of the job's processes.
      JoinError: see `join`.
    """
    if mesh is None or jax.process_count() == 1:
        return None
    on_mesh = {device.process_index for device in mesh.devices.flat}
    if on_mesh == {jax.process_index()}:
        return None
    left_out = sorted(set(range(jax.process_count())) - on_mesh)
    if left_out:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has no device of process(es) {left_out}, but a model is "
            f"served by one process or by all: make it {len(jax.devices())} devices large, one "
            "of this process's own devices, or start fewer processes"
        )
    return join()


def _place(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environ: Mapping[str, str],
) -> _Place | None:
    """Where this process stands; None for a job of one."""
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
            f"{', '.join(missing)} missing: several processes need coordinator (host:port of "
            f"process 0), num_processes and process_id, given or as {COORDINATOR_VARIABLE}, "
            f"{NUM_PROCESSES_VARIABLE} and {PROCESS_ID_VARIABLE}; one process needs none of them"
        )
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"coordinator={coordinator!r} is not allowed; give host:port")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes={num_processes} is not allowed; give at least 1")
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
        raise ValueError(f"{name}={text!r} is not allowed; give a whole number")
    return int(text)


def _timeout(given_s: float | None) -> float:
    if given_s is None:
        set_s = _whole(os.environ, TIMEOUT_VARIABLE)
        given_s = DEFAULT_TIMEOUT_S if set_s is None else set_s
    if given_s < 1:
        raise ValueError(f"a start-up timeout of {given_s} s is not allowed; give at least 1")
    return given_s


def _initialize(place: _Place, timeout_s: float) -> None:
    # Its handler would take SIGTERM for advice to save a checkpoint, and the process would stay.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            initialization_timeout=int(timeout_s) + _GRACE_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except RuntimeError as error:  # also XLA's own
        raise JoinError(
            f"{place} could not join the others ({str(error).splitlines()[0]}); call "
            "sharding.join() before anything else that uses JAX, with a coordinator whose port is "
            "free"
        ) from error


@contextmanager
def _within(timeout_s: float, place: _Place) -> Iterator[None]:
    """A block that ends the process if it takes longer: inside, JAX waits, or aborts itself."""

    def give_up() -> None:
        line = (
            f"jaxserve: {place} has waited {timeout_s:g} s for the others in vain. See whether all "
            "were started, with the same coordinator and number, whether they can reach it, and "
            f"what they printed; {TIMEOUT_VARIABLE} sets how long to wait.\n"
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


def _connect(coordinator: str | None) -> ProcessGroup:
    """Connect the leader with all others; where, they learn from one broadcast over the devices."""
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
                f"({error}); give a coordinator address that it can reach, and let the network "
                "pass any port between the hosts"
            ) from error
        return ProcessGroup(
            process_id,
            num_processes,
            {LEADER: connection},
            {LEADER: leader_host, process_id: own_host},
        )
    key = os.urandom(32)
    is_local = host in ("localhost", "127.0.0.1")
    with Listener(
        ("127.0.0.1" if is_local else "", 0), backlog=num_processes, authkey=key
    ) as listener:
        _shared((host, int(listener.address[1]), key))
        connections, hosts = _accept(listener, own_host, num_processes)
    return ProcessGroup(process_id, num_processes, connections, {**hosts, LEADER: own_host})


def _shared(address: tuple[str, int, bytes] | None) -> tuple[str, int, bytes]:
    """The leader's address and key, on every process; `address` is None on the others."""
    data = np.zeros(_ADDRESS_BYTES, np.uint8)
    if address is not None:
        pickled = pickle.dumps(address)
        data[: len(pickled)] = np.frombuffer(pickled, np.uint8)
    return pickle.loads(multihost_utils.broadcast_one_to_all(data).tobytes())


def _accept(
    listener: Listener, own_host: str, num_processes: int
) -> tuple[dict[int, Connection], dict[int, str]]:
    """Connections and host names of all followers, in whatever order they come."""
    connections: dict[int, Connection] = {}
    hosts: dict[int, str] = {}
    while len(connections) < num_processes - 1:
        try:
            connection = listener.accept()
            peer, host = connection.recv()
            connection.send(own_host)
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # a stranger, or one that died: then the others do not get far either
        connections[peer], hosts[peer] = connection, host
    return connections, hosts
