"""Names for everything that decides a compiled program, from which its key in the store is made.

A name says the same in every process, and different things have different names. Where that cannot
be promised, `Unnameable` is raised, and the program is not stored.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_kernels.build import cpu_model

# Packages whose sources or versions are part of every key. Only their classes and functions have
# names.
_OURS = ("jaxserve", "pallas_kernels", "predictor", "sharding")
_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_BUILTIN = ("builtins", "collections", "functools", "jaxtyping")
_ENVIRONMENT = ("XLA_", "TF_XLA_", "LIBTPU_", "NVIDIA_TF32", "CUDA_VISIBLE_DEVICES")
# Values of `jax.config` that decide where and what JAX reports and keeps, not what it compiles.
_REPORTING = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_debug_log")
_IGNORED_FILES = ("__pycache__",)


class Unnameable(Exception):
    """Something has no name that says the same in every process."""


def key_of(*parts: Any) -> str:
    """Return a key for the store.

    Raises:
      Unnameable: a part has no name.
    """
    digest = hashlib.sha256()
    for part in parts:
        for token in _tokens(part):
            digest.update(token.encode())
            digest.update(b"\0")
    return digest.hexdigest()[:40]


@functools.cache
def our_sources() -> str:
    """Return a digest of the sources of our packages, as they were when this module was imported.

    Sources that are edited later are not those of the modules that this process runs.
    """
    lines = [line for name in _OURS for line in _sources(name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def this_installation() -> str:
    """Return a digest of the machine, and of the versions and variables of what we run on."""
    lines = [platform.python_version(), platform.machine(), cpu_model()]
    lines += [f"{name} {_version(name)}" for name in _VERSIONED]
    lines += sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ENVIRONMENT))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def these_settings() -> str:
    """Return JAX's settings that may decide what is traced and compiled."""
    values = jax.config.values.items()
    return repr(sorted((k, repr(v)) for k, v in values if not k.startswith(_REPORTING)))


def describe_devices(devices: list[Any]) -> tuple[Any, ...]:
    """Return what an executable depends on of the devices that it runs on."""
    client = devices[0].client
    return (
        *(client.platform, client.platform_version, jax.process_count()),
        tuple((each.id, each.device_kind) for each in devices),
    )


def kept_arguments(lowered: jax.stages.Lowered) -> list[int] | None:
    """Return the indices of the flat arguments that a lowered program uses.

    None with a version of JAX that does not tell, so that the program is not stored. JAX has them
    in no public attribute.
    """
    details = getattr(getattr(lowered, "_lowering", None), "compile_args", {})
    kept = details.get("kept_var_idx")
    return None if kept is None else sorted(kept)


def _tokens(value: Any) -> Iterator[str]:
    """Yield the parts of a value's name."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield f"{type(value).__name__}:{value!r}"
    elif isinstance(value, enum.Enum):
        yield from (_global(type(value)), value.name)
    elif isinstance(value, (np.dtype, jax.tree_util.PyTreeDef)):
        yield str(value)
    elif isinstance(value, jax.ShapeDtypeStruct):
        yield f"{value.shape}{value.dtype}{value.weak_type}"
        yield from _tokens(value.sharding)
    elif isinstance(value, jax.sharding.Sharding):
        # Devices are described apart.
        yield f"{value} {value.memory_kind}"
    elif isinstance(value, (np.ndarray, np.generic)):
        yield f"{value.shape}{value.dtype}{np.asarray(value).tobytes().hex()}"
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        yield _global(value)
    elif isinstance(value, functools.partial):
        yield "partial"
        yield from _tokens((value.func, value.args, value.keywords))
    elif isinstance(value, Mapping):
        # Flax copies the metadata of a variable in an order that differs between processes.
        yield f"{{{len(value)}"
        yield from sorted("\1".join(_tokens(item)) for item in value.items())
    elif isinstance(value, (tuple, list)):
        yield f"{_global(type(value))}{len(value)}"
        for item in value:
            yield from _tokens(item)
    elif isinstance(value, (set, frozenset)):
        yield f"set{len(value)}"
        yield from sorted("\1".join(_tokens(item)) for item in value)
    elif dataclasses.is_dataclass(value) or isinstance(value, nnx.GraphDef):
        yield _global(type(value))
        for field in dataclasses.fields(value):
            yield from (field.name, *_tokens(getattr(value, field.name)))
    elif callable(value) and hasattr(value, "__wrapped__"):  # a jitted function of JAX's own
        yield "wrapped"
        yield from _tokens(value.__wrapped__)
    else:
        raise Unnameable(f"{type(value).__module__}.{type(value).__qualname__}")


def _global(thing: Any) -> str:
    """Return the name under which a module of ours, or of JAX and Flax, has a class or function."""
    module, name = thing.__module__ or "builtins", thing.__qualname__
    package = module.partition(".")[0]
    if package not in (*_OURS, *_VERSIONED, *_BUILTIN) or "<" in name:
        raise Unnameable(f"{module}.{name}")
    return f"{module}.{name}"


def _sources(package: str) -> list[str]:
    """Return a line for every file of a package: its name and a digest of its contents."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package} has no folder")
    root = Path(spec.submodule_search_locations[0])
    lines = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _IGNORED_FILES)
        for name in sorted(names):
            path = Path(folder, name)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{package}/{path.relative_to(root)} {digest}")
    return lines


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return sys.modules[name].__version__


our_sources()
