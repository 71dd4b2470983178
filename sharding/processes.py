"""The start-up of a job of several processes, on one host or many."""

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

from sharding.groups import DeviceGroups
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

# Launchers that JAX recognises (SLURM's srun, Open MPI) put the number of processes here.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# JAX's own heartbeat: catches processes that die before they are connected, or hang entirely.
_HEARTBEAT_S = 25
# Processes end together, see `ProcessGroup.leave`; this bounds the wait for one that dies then.
_SHUTDOWN_S = 10
# JAX aborts the process at its time limit; ours comes first, with a line that says what to do.
_GRACE_S = 30
_ADDRESS_BYTES = 512

# One per process, like `jax.distributed`.
_joined: ProcessGroup | None = None


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
) -> ProcessGroup | None:
    """Join this process to a job, and return when all of its processes have joined.

    Return None for a job of one process. An argument that is None is read from
    `JAXSERVE_COORDINATOR`, `JAXSERVE_NUM_PROCESSES` or `JAXSERVE_PROCESS_ID`, then from the
    launcher (SLURM's srun, Open MPI). If the script has called `jax.distributed.initialize`
    itself, the job consists of those processes. Call this before anything else that uses JAX;
    a second call returns the result of the first.

    From then on the end of one process ends all, see `ProcessGroup`. A process that waits longer
    than the timeout prints one line to stderr and exits with code 1.

    Args:
      coordinator: host and free port on process 0, the same on all processes.
      process_id: from 0; process 0 is the leader.
      timeout_s: how long to wait for the others; the default is `JAXSERVE_START_TIMEOUT`, or 120.

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
    atexit.register(_joined.leave)  # runs before JAX's own handler, registered at its import
    return _joined


def group_over(mesh: Mesh | DeviceGroups | None) -> ProcessGroup | None:
    """Return the group of the processes that own a mesh's devices; None if this one owns all.

    Raises:
      ValueError: the mesh has devices of some, but not all, of the job's processes.
      JoinError: see `join`.
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


def _timeout(given_s: float | None) -> float:
    if given_s is None:
        set_s = _whole(os.environ, TIMEOUT_VARIABLE)
        given_s = DEFAULT_TIMEOUT_S if set_s is None else set_s
    if given_s < 1:
        raise ValueError(f"a start-up timeout of {given_s} s is not allowed; set at least 1")
    return given_s


def _initialize(place: _Place, timeout_s: float) -> None:
    # Its handler treats SIGTERM as a notice to save a checkpoint, and the process would not end.
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
            f"reach it, and what they printed; {TIMEOUT_VARIABLE} sets how long to wait.\n"
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
