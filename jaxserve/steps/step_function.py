"""A jitted function whose executables are prepared before its calls, and saved for later processes.

`jax.jit` compiles at a call. A `StepFunction` also prepares an executable without running it, on
any thread: it loads it from the store if possible, and otherwise traces and compiles it once.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int32

from jaxserve.core.errors import is_out_of_memory
from jaxserve.core.host import release_freed_memory
from jaxserve.core.stalls import STALLS
from jaxserve.kernels import dispatch
from jaxserve.kernels.cpu_targets import target_names
from jaxserve.kernels.versions import kept_arguments
from jaxserve.models.batch import KVCache, split_states
from jaxserve.models.config import DecoderConfig
from jaxserve.sharding.rules import replicated
from jaxserve.sharding.shards import TENSOR
from jaxserve.steps.executable_store import (
    ExecutableStore,
    Unnameable,
    describe_devices,
    key_of,
    our_sources,
    these_settings,
    this_installation,
    without_jax_cache,
)

# Seconds of a compilation that leaves much freed memory behind.
_LARGE_S = 1.0


@final
@dataclass(frozen=True)
class Placement:
    """The shardings of everything that the engine makes in addition to the parameters."""

    mesh: Mesh | None  # None on one device
    whole: Sharding  # sharding of slots and outputs, a copy on every device
    # Sharding of pages, and of split states: their heads are split over the mesh's `tensor` axis.
    pages: Sharding

    @classmethod
    def like(cls, sharding: Sharding) -> Placement:
        """Return the placement that matches parameters with this sharding."""
        if not isinstance(sharding, NamedSharding):
            return cls(None, sharding, sharding)
        mesh: Any = sharding.mesh
        pages = PartitionSpec(None, None, TENSOR if TENSOR in mesh.shape else None)
        return cls(mesh, replicated(mesh), NamedSharding(mesh, pages))

    @property
    def num_shards(self) -> int:
        """Return the number of parts that the KV heads are split into."""
        return 1 if self.mesh is None else self.mesh.shape.get(TENSOR, 1)

    def cache(self, config: DecoderConfig) -> KVCache:
        """Return the shardings of a model's cache, a tree prefix of it."""
        states = {
            name: self.pages if is_split else self.whole
            for name, is_split in split_states(config, self.num_shards).items()
        }
        pages: Any = self.pages
        return KVCache(pages, pages, pages, pages, cast(Any, states))

    def in_force(self) -> AbstractContextManager[Any]:
        """Return the context in which executables are traced and called."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def staging_place(place: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding of incoming pages: pinned host memory, which the device can read."""
    return place.with_memory_kind("pinned_host")


_log = logging.getLogger(__name__)

# Recorded with `jax.monitoring` for a call that waits while its executable is loaded, or compiled
# by another thread. JAX records compilations of the calling thread itself.
STALL_EVENT = "/jaxserve/executable_wait_duration"

# Recorded for every executable that is made, with the `name` of its function. A lowered program
# whose executable an earlier start has saved counts as compiled, since it was traced.
COMPILED_EVENT = "/jaxserve/executable/compiled"
LOADED_EVENT = "/jaxserve/executable/loaded"


@final
class Shelf:
    """The common part of one placement's executables: devices, and the store that saves them.

    A key that can be made without tracing leads to the name of a lowered program, and that to the
    executable. So a start traces nothing, and a change of our sources that leaves a program
    unchanged compiles nothing.

    Args:
      above: digest of everything that decides the programs themselves and that they share.
      kernels: the C++ kernels that they may call, see `jaxserve.kernels.cpu_targets.target_names`.
    """

    def __init__(
        self,
        place: Placement,  # where the programs run
        store: ExecutableStore | None = None,  # None to save nothing
        below: str = "",  # digest of everything that decides what XLA makes of a program
        above: str = "",
        kernels: tuple[str, ...] = (),
    ):
        self.in_force = place.in_force
        self.devices = devices_of(place)
        self._functions: dict[Any, StepFunction] = {}
        self._names: dict[int, str] = {}  # of executables, by their ids
        # An ordered set: the kernels chosen for these programs so far -> None.
        self._chosen: dict[dispatch.Choice, None] = {}
        self._store = store
        self._below = below
        self._above = above
        self._kernels = kernels

    def function(
        self, name: str, function: Callable[..., Any], *sizes: Any, **options: Any
    ) -> StepFunction:
        """Return the `StepFunction` of a name and hashable sizes, made at the first call.

        Runtimes with shared programs thus share their own functions as well.
        """
        key = name, sizes
        if key not in self._functions:
            self._functions[key] = StepFunction(
                name, function, self, sizes=sizes, num_fixed=0, **options
            )
        return self._functions[key]

    @property
    def knows_first(self) -> bool:
        """Return whether this start loads early what the last one used first."""
        return self._store is not None and self._store.knows_first

    def end_start(self) -> None:
        if self._store is not None:
            self._store.end_start()

    def key(self, *parts: Any) -> str | None:
        """Return the key of something that these programs and `parts` decide; None if not saved."""
        if self._store is None:
            return None
        try:
            return key_of(self._above, parts)
        except Unnameable as error:
            _log.info("an executable is not kept for later starts, as it depends on %s", error)
            return None

    def load(self, key: str | None) -> jax.stages.Compiled | None:
        """Return the executable that an earlier start saved for a key; None without one.

        The kernels that the earlier start had chosen by then are recorded as if chosen now. JAX
        traces common parts of programs once, so the kernels of one program cannot be told apart.
        """
        kept = self.read(key)
        if self._store is None or kept is None:
            return None
        name, _, chosen = kept.decode().partition("\n")
        executable = self._load(name)
        if executable is not None:
            for each in json.loads(chosen):
                choice = dispatch.Choice(**each)
                self._chosen[choice] = None
                dispatch.add(choice)
        return executable

    def make(
        self,
        jitted: Any,
        arguments: tuple[Any, ...],
        static: dict[str, Any],
        key: str | None,
        leaves: Sequence[Any],
    ) -> jax.stages.Compiled:
        """Compile a jitted function for arguments of these shapes; save it under a key.

        `leaves` describe the arguments and options. If the program does not compile because a
        kernel in it does not, the kernel's operation uses its next implementation.
        """
        with self.in_force():
            traced = self._trace(jitted, arguments, static)
            try:
                return self._compile(traced.lower(), key, leaves)
            except Exception as error:  # of Pallas, XLA or ptxas
                if is_out_of_memory(error):  # while XLA tunes
                    raise
                with dispatch.compiling_alone() as refused:
                    traced = self._trace(jitted, arguments, static)
                if not refused:
                    raise
            jax.clear_caches()  # of traces with the kernels that are refused now
            return self._compile(traced.lower(), key, leaves)

    def _trace(self, jitted: Any, arguments: tuple[Any, ...], static: dict[str, Any]) -> Any:
        with dispatch.noted() as chosen:
            traced = jitted.trace(*arguments, **static)
        self._chosen.update(dict.fromkeys(chosen))
        return traced

    def _compile(
        self, lowered: jax.stages.Lowered, key: str | None, leaves: Sequence[Any]
    ) -> jax.stages.Compiled:
        kept = kept_arguments(lowered)
        if self._store is None or key is None or kept is None:
            return lowered.compile()
        # The text lacks the arguments that the program does not use, and an executable checks all.
        trees = str(lowered.in_tree), str(lowered.out_tree)
        name = key_of(self._below, trees, list(leaves), kept, lowered.as_text())
        executable = self._load(name)
        if executable is None:
            begin_s = time.perf_counter()
            with without_jax_cache(self.devices[0].platform) as options:
                executable = lowered.compile(options)
            if time.perf_counter() - begin_s > _LARGE_S:
                release_freed_memory()
            self._store.save(name, executable)
            self._names[id(executable)] = name
        # If a kernel did not compile now, the program has XLA's operations instead.
        if not self._kernels or target_names() == self._kernels:
            choices = json.dumps([asdict(choice) for choice in tuple(self._chosen)])
            self._store.write(key, f"{name}\n{choices}".encode())
        return executable

    def read(self, key: str | None) -> bytes | None:
        return None if self._store is None or key is None else self._store.read(key)

    def write(self, key: str | None, contents: bytes) -> None:
        if self._store is not None and key is not None:
            self._store.write(key, contents)

    def number(self, name: str, leaves: Sequence[Any], measure: Callable[[], int]) -> int:
        """Return a number that an earlier process measured for these arrays, or measure it."""
        key = self.key(name, [shape_of(leaf) for leaf in leaves])
        kept = self.read(key)
        if kept is not None:
            return int(kept)
        number = measure()
        self.write(key, str(number).encode())
        return number

    def note_use(self, executable: jax.stages.Compiled) -> None:
        """Record the first call of an executable, so that the next start loads it early."""
        name = self._names.get(id(executable))
        if self._store is not None and name is not None:
            self._store.note_use(name)

    def _load(self, name: str) -> jax.stages.Compiled | None:
        executable = None if self._store is None else self._store.load(name, self.devices)
        if executable is not None:
            self._names[id(executable)] = name
        return executable


def shelf_of(store: ExecutableStore | None, place: Placement, *parts: Any) -> Shelf:
    """Return the shelf of programs that `parts` decide.

    Programs over several processes are not saved, nor those decided by a part without a name.
    """
    if store is None or (place.mesh is not None and place.mesh.is_multi_process):
        return Shelf(place)
    devices = devices_of(place)
    kernels = target_names() if devices[0].platform == "cpu" else ()
    try:
        below = key_of(this_installation(), these_settings(), describe_devices(devices))
        above = key_of(below, our_sources(), place.whole, place.pages, kernels, parts)
    except Unnameable as error:
        _log.info("executables are not kept for later starts, as they depend on %s", error)
        return Shelf(place)
    return Shelf(place, store, below, above, kernels)


def unkept(sharding: jax.sharding.Sharding) -> Shelf:
    """Return a shelf for arrays with this sharding that saves nothing."""
    return Shelf(Placement.like(sharding))


def devices_of(place: Placement) -> list[Any]:
    return list(place.whole.device_set) if place.mesh is None else list(place.mesh.devices.flat)


@final
class StepFunction:
    """A jitted function on a shelf, traced and called with the shelf's mesh in force.

    A call must pass arrays where `prepare` gets arrays or their shapes. The executable is looked up
    by the static arguments and by the shape of the first leaf of each argument. If it refuses the
    arguments, all shapes and dtypes are compared. If it refuses them again, as for arrays on
    different devices, `jax.jit` serves this call and later ones like it, and this is logged once.

    Args:
      sizes: what `function` depends on in addition to its arguments and what names the shelf.
      flattens: pass the first argument, the parameters of a model, as a list of its arrays. A call
        that gets the list already is quick: JAX flattens hundreds of Flax's variables in Python.
      num_fixed: number of first arguments that have the same shapes in nearly every call.
      packs: pass every argument of several NumPy arrays as one buffer, see `OneBuffer`.
      options: of `jax.jit`.
    """

    def __init__(
        self,
        name: str,  # of the function on the shelf
        function: Callable[..., Any],  # function of arrays and static keyword arguments
        shelf: Shelf,
        *,
        sizes: tuple[Any, ...] = (),
        flattens: bool = False,
        num_fixed: int = 1,
        packs: bool = False,
        **options: Any,
    ):
        self._name = name
        self._flattens = flattens
        self._packs = packs
        self._jitted = jax.jit(_unpacking(name, function) if packs else function, **options)
        self._compiler_options = options.get("compiler_options")
        self._shelf = shelf
        self._sizes = sizes
        self._num_fixed = num_fixed
        self._lock = threading.Lock()
        self._found: dict[Any, jax.stages.Compiled] = {}
        self._refused: set[Any] = set()
        self._prepared: dict[Any, Future[jax.stages.Compiled]] = {}

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        arguments = self._passed(arguments)
        sizes = tuple(map(size_of, arguments[self._num_fixed :]))
        known = (sizes, *static.values())
        if known in self._refused:
            return self._traced_again(arguments, static)
        executable = self._found.get(known)
        if executable is not None:
            try:
                return executable(*arguments)
            except (TypeError, ValueError) as error:
                if has_deleted(arguments):  # no executable takes them
                    raise
                _log.debug("%s: looking for another executable: %s", self._name, error)
        with STALLS.waiting():
            executable = self._found[known] = self._prepare(arguments, static, stalls=True)
        self._shelf.note_use(executable)
        try:
            return executable(*arguments)
        except (TypeError, ValueError) as error:
            if has_deleted(arguments):
                raise
            self._refused.add(known)
            _log.warning(
                "%s: its executable refuses these arrays, so that it is compiled again: %s",
                self._name,
                str(error).partition("\n")[0],
            )
            return self._traced_again(arguments, static)

    def _traced_again(self, arguments: tuple[Any, ...], static: dict[str, Any]) -> Any:
        with self._shelf.in_force():
            return self._jitted(*arguments, **static)

    def prepare(self, *arguments: Any, **static: Any) -> jax.stages.Compiled:
        """Return the executable for arguments of these shapes; load or compile it if needed.

        Any thread may call it. Each executable is made once; other threads wait for it. Arguments
        are arrays, or a `jax.ShapeDtypeStruct` with a sharding instead of a jax.Array.
        """
        return self._prepare(self._passed(arguments), static, stalls=False)

    def trace(self, *arguments: Any, **static: Any) -> Any:
        """Return what `jax.jit` traces, for lowering to another platform."""
        return self._jitted.trace(*self._passed(arguments), **static)

    def _passed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        first: tuple[Any, ...] = ()
        if self._flattens:
            first, arguments = (as_list(arguments[0]),), arguments[1:]
        return first + (tuple(map(packed, arguments)) if self._packs else arguments)

    def _prepare(
        self, arguments: tuple[Any, ...], static: dict[str, Any], *, stalls: bool
    ) -> jax.stages.Compiled:
        signature = signature_of(arguments, static)
        with self._lock:
            future = self._prepared.get(signature)
            is_ours = future is None
            if future is None:
                future = self._prepared[signature] = Future()
        if not is_ours:
            if not stalls:
                return future.result()
            if not future.done():
                _record_stall()
            # A thread that prepares it may have failed for lack of memory; a call tries again.
            if future.exception() is None:
                return future.result()
            return self._prepare(arguments, static, stalls=False)
        try:
            executable = self._make(arguments, static, stalls=stalls)
        except BaseException as error:
            with self._lock:
                del self._prepared[signature]
            future.set_exception(error)
            raise
        future.set_result(executable)
        return executable

    def _make(
        self, arguments: tuple[Any, ...], static: dict[str, Any], *, stalls: bool
    ) -> jax.stages.Compiled:
        shelf = self._shelf
        shapes = abstract(arguments)
        leaves, structure = jax.tree.flatten(shapes)
        leaves = [*map(shape_of, leaves), self._compiler_options]
        key = shelf.key(self._name, self._sizes, static, structure, leaves)
        begin_s = time.perf_counter()
        executable = shelf.load(key)
        if executable is None:
            executable = shelf.make(self._jitted, shapes, static, key, leaves)
            event = COMPILED_EVENT
        else:
            event = LOADED_EVENT
            if stalls:
                _record_stall()
        passed_s = time.perf_counter() - begin_s
        jax.monitoring.record_event_duration_secs(event, passed_s, name=self._name)
        return executable


def _unpacking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of packed arguments, named `name`; its arguments keep their names."""

    def unpacking(*arguments: Any, **static: Any) -> Any:
        return function(*map(unpacked, arguments), **static)

    unpacking.__name__ = name
    # Not `functools.wraps`: JAX would describe the wrapped function, with the model that is bound
    # to it, for each of the jitted functions of a start.
    vars(unpacking)["__signature__"] = inspect.signature(function)
    return unpacking


def _record_stall() -> None:
    jax.monitoring.record_event_duration_secs(STALL_EVENT, 0.0)


_WORD_BYTES = 4


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneBuffer:
    """A pytree whose arrays are concatenated in one buffer, so that a call makes one transfer.

    Only the values are traced.
    """

    # Bits of the arrays, in the order of the leaves; a bool takes a word.
    words: Int32[Array, " words"]
    structure: Any = field(metadata={"static": True})  # of the tree
    # Shape and dtype of each leaf.
    layout: tuple[tuple[tuple[int, ...], str], ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> Self:
        """Return a buffer of NumPy arrays, or raise TypeError for elements not bool or 4 bytes."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in leaves]
        words: Any = np.concatenate(
            [_words(array) for array in arrays]
        )  # NumPy, until it is traced
        return cls(words, structure, tuple((each.shape, each.dtype.name) for each in arrays))

    def tree(self) -> Any:
        """Return the pytree; to be called where `words` is traced."""
        leaves, start = [], 0
        for shape, name in self.layout:
            size = int(np.prod(shape))
            words = self.words[start : start + size].reshape(shape)
            start += size
            is_bool = name == "bool"
            leaf = words != 0 if is_bool else jax.lax.bitcast_convert_type(words, jnp.dtype(name))
            leaves.append(leaf)
        return jax.tree.unflatten(self.structure, leaves)


def _words(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(np.int32).ravel()
    if array.dtype.itemsize != _WORD_BYTES:
        raise TypeError(f"an array of {array.dtype} does not fit a buffer of words; pass it alone")
    return np.ascontiguousarray(array).view(np.int32).ravel()


def packed(argument: Any) -> Any:
    """Return an argument's arrays as one buffer if they are several of NumPy, else unchanged."""
    leaves = jax.tree.leaves(argument)
    if len(leaves) < 2 or not all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        return argument
    return OneBuffer.of(argument)


def as_list(params: Any) -> list[Any]:
    """Return the arrays of a model's parameters, in the order in which `nnx.merge` takes them."""
    return params if isinstance(params, list) else jax.tree.leaves(params)


def unpacked(argument: Any) -> Any:
    """Undo `packed`."""
    return argument.tree() if isinstance(argument, OneBuffer) else argument


def has_deleted(tree: Any) -> bool:
    """Return whether an array of a tree was deleted, as donated ones are."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return any(array.is_deleted() for array in arrays)


def abstract(tree: Any) -> Any:
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: Any) -> Any:
    """Return the shape of an array on devices; arrays of the host are placed by each call."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
    )


def shape_of(leaf: Any) -> Any:
    """Return the shape of an array on devices or of the host, for a key."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return _abstract(leaf)


def size_of(argument: Any) -> tuple[int, ...] | None:
    if argument is None:
        return None
    if isinstance(argument, (np.ndarray, np.generic, jax.Array)):
        return argument.shape
    leaves = jax.tree.leaves(argument)
    return leaves[0].shape if leaves else None


def signature_of(arguments: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """Return what distinguishes the executables of one function."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(_leaf_signature, leaves)), *static.values()


def _leaf_signature(leaf: Any) -> Any:
    placed = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    return leaf.shape, leaf.dtype, leaf.sharding.memory_kind if placed and leaf.sharding else None
