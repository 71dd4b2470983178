"""Loading of a checkpoint for a runtime."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
from jax.sharding import Mesh

from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.compatibility import Setting, check_storage, check_together
from jaxserve.execution.compilation import executable_store, start_jax
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.sizes import platform_defaults
from jaxserve.kernels.build import multiplies_bfloat16
from jaxserve.kernels.cpu_targets import compile_together
from jaxserve.runtime.build import check_early
from jaxserve.runtime.processes import own_mesh, processes_of
from jaxserve.scheduling.presets import get_policy_for
from jaxserve.sharding import DeviceGroups, StagePlan
from jaxserve.steps.executable_store import (
    Unnameable,
    key_of,
    our_sources,
    these_settings,
    this_installation,
)
from jaxserve.steps.preparation import start_thread

if TYPE_CHECKING:
    from jaxserve.models.store import LoadedModel

_T = TypeVar("_T")


def load_for(
    options: RuntimeOptions,
    name_or_path: str,
    *,
    load: Literal["auto", "random"],
    dtype: str | None,
    mesh: Mesh | StagePlan | DeviceGroups | None,
) -> LoadedModel:
    """Load the model of a runtime with these options, as `Runtime.from_pretrained` documents it.

    It checks the options before it reads a file. With device groups, the weights are read onto the
    encode group, and copied from there to the decode group; with groups in several processes, each
    process reads them onto its own group.
    """
    from jaxserve.models.registry import resolve

    policy = get_policy_for(options.policy, has_groups=isinstance(mesh, DeviceGroups))
    start_jax()
    group = processes_of(mesh)
    num_processes = 1 if group is None else group.num_processes
    check_together(Setting(options=options, mesh=mesh, num_processes=num_processes))
    check_early(options, policy, mesh, group)
    check_storage(options, mesh, dtype or platform_defaults().dtype)
    # Before the threads, which would outlive the error of an unknown model.
    found = resolve(name_or_path)
    path = found.fetch(weights=load == "auto", progress=options.progress)
    is_narrow = found.kind == "gguf" or is_in_bfloat16(path)
    panels = panels_for(options, dtype, mesh, is_narrow=is_narrow)
    _begin_to_load(options, name_or_path, dtype, mesh, panels)
    with nullcontext() if group is None else group.together():
        return load_weights(
            options, name_or_path, load=load, dtype=dtype, mesh=own_mesh(mesh, group), panels=panels
        )


def panels_of(options: RuntimeOptions, name_or_path: str, dtype: str | None, mesh: Any) -> str:
    """Return the dtype in which `load_for` stores the dense weights of a model on one CPU."""
    from jaxserve.models.registry import resolve

    found = resolve(name_or_path)
    is_narrow = found.kind == "gguf" or is_in_bfloat16(found.fetch(weights=False, progress=False))
    return panels_for(options, dtype, mesh, is_narrow=is_narrow)


def panels_for(
    options: RuntimeOptions, dtype: str | None, mesh: Any, *, is_narrow: bool = True
) -> str:
    """Return the dtype of dense weights on one CPU, of which none is asked for.

    Where the processor multiplies bfloat16 numbers, products of these are much faster.
    `is_narrow` is whether the checkpoint has the weights in 16 or fewer bits.
    """
    is_free = (
        is_narrow and dtype is None and options.quantize is None and options.kv_dtype != "float32"
    )
    is_alone = mesh is None and jax.default_backend() == "cpu"
    return "bfloat16" if is_free and is_alone and multiplies_bfloat16() else "float32"


def is_in_bfloat16(folder: Path) -> bool:
    """Return whether a folder has weights in bfloat16, as its config.json says."""
    from jaxserve.models.quantised_folders.folder import method_in
    from jaxserve.models.registry import config_json

    given = config_json(folder)
    if method_in(folder, given) is not None:
        return False
    text = given.get("text_config") or {}
    stored = (each.get(name) for each in (given, text) for name in ("dtype", "torch_dtype"))
    return "bfloat16" in stored


def load_weights(
    options: RuntimeOptions,
    name_or_path: str,
    *,
    load: Literal["auto", "random"] = "auto",
    dtype: str | None,
    mesh: Mesh | StagePlan | DeviceGroups | None,
    panels: str = "float32",
) -> LoadedModel:
    """Load a model in the form in which a runtime with these options stores it.

    `panels` is the dtype of dense weights of a float32 model on one CPU.
    """
    from jaxserve.models.quantisation import Quantisation
    from jaxserve.models.store import load_model

    with out_of_memory_as("loading the weights", "pass a smaller dtype or a smaller model"):
        return load_model(
            name_or_path,
            dtype=dtype or platform_defaults().dtype,
            load=load,
            seed=options.seed,
            mesh=mesh,
            quantisation=Quantisation.at_loading(options, mesh, panels),
            saves_behind=True,
            huge_pages=options.huge_pages,
            remember=_remembered,
            progress=options.progress,
        )


def _remembered(values: tuple[Any, ...], make: Callable[[], _T]) -> _T:
    """Return what an earlier process made of these values with this installation, or make it."""
    try:
        key = key_of("made", this_installation(), our_sources(), these_settings(), values)
    except Unnameable:  # a family of the user's
        return make()
    return executable_store().remembered(key, make)


def _begin_to_load(
    options: RuntimeOptions,
    name_or_path: str,
    dtype: str | None,
    mesh: Mesh | StagePlan | DeviceGroups | None,
    panels: str,
) -> None:
    """Load C++ kernels, and executables that will be needed first, while the weights are read.

    On a machine's first start a compiler makes the kernels, which takes seconds.
    """
    is_cpu, store = jax.default_backend() == "cpu", executable_store()
    panels = "bfloat16" if options.quantize == "bf16" else panels
    pages_dtype = options.kv_dtype or dtype or platform_defaults().dtype
    if panels == "bfloat16" and options.kv_dtype is None:
        pages_dtype = panels
    is_expected = False
    if mesh is None:
        try:
            parts = this_installation(), our_sources(), str(name_or_path), dtype, options
            is_expected = store.expect(key_of("first executables", *parts))
        except Unnameable:  # options that are the user's objects
            is_expected = False

    def run() -> None:
        try:
            if is_cpu:
                compile_together(
                    pages_dtype,
                    panels,
                    is_quantised=options.quantize not in (None, "bf16"),
                    has_adapters=options.max_adapters > 0,
                )
        except RuntimeError as error:  # the process ends, because the model was refused
            if "shutdown" not in str(error):
                raise
        finally:
            if is_expected:
                store.load_expected([jax.devices()[0]])

    if is_cpu or is_expected:
        thread = start_thread("jaxserve-first", run)

        @atexit.register
        def end() -> None:
            """End the thread, which would crash inside XLA when the interpreter exits."""
            store.end_start()
            thread.join()
