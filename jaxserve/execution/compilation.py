"""Compilation: the store of executables, and the warm-up."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxserve.core.assets import cache_folder
from jaxserve.execution.device_errors import check_gpu_is_used
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.steps.executable_store import ExecutableStore, Unnameable, key_of, this_installation
from jaxserve.steps.preparation import Preparation

_log = logging.getLogger(__name__)

# The least that an earlier pool may have of the pages that fit now. Free memory of a host differs
# more from start to start than a GPU's.
_SMALLEST_SHARE = {"cpu": 0.7}
_SMALLEST_SHARE_OTHERWISE = 0.95
# Leading bits of a new size on a host; the others are 0, so that a start with a little less free
# memory has the same size.
_SIZE_BITS = 3
# Sizes of earlier starts that are remembered, for each of which executables may be in the store.
_MAX_SIZES = 8
# Names of the steps of a warm-up that run on the device, one after the other.
_RUN = ("page swaps", "encoder")


def start_jax(folder: Path | None = None) -> None:
    """Start JAX's devices, and store every executable in its persistent cache, however small.

    A folder that the user has set in JAX stays; the default is below jaxserve's cache folder. If it
    cannot be made, nothing is stored. Raises what `check_gpu_is_used` raises.
    """
    check_gpu_is_used(os.environ, jax.config.values)
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = folder or cache_folder() / "xla"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # of which the store of executables warns
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@cache
def _store_in(folder: Path) -> ExecutableStore:
    return ExecutableStore(folder)


def executable_store() -> ExecutableStore:
    return _store_in(cache_folder() / "executables")


def steady(num_pages: int, wanted: int, store: ExecutableStore, *parts: Any) -> int:
    """Return the largest size of earlier starts' page pools that fits and is not much smaller.

    Free memory differs from start to start, and executables are for one number of pages. `parts` is
    what both starts must have in common; `num_pages` of the `wanted` ones fit now.
    """
    try:
        key = key_of("pool", this_installation(), parts)
    except Unnameable:
        return num_pages
    kept = [int(number) for number in (store.read(key) or b"").split()]
    share = _SMALLEST_SHARE.get(jax.default_backend(), _SMALLEST_SHARE_OTHERWISE)
    fitting = [number for number in kept if share * num_pages <= number <= num_pages]
    if fitting:
        if max(fitting) < num_pages:
            _log.info(
                "%d of the %d pages that fit are used, as at an earlier start",
                max(fitting),
                num_pages,
            )
        return max(fitting)
    if jax.default_backend() == "cpu" and num_pages < wanted:
        num_pages -= num_pages % (1 << max(0, num_pages.bit_length() - _SIZE_BITS))
    newest = [*kept, num_pages][-_MAX_SIZES:]
    store.write(key, " ".join(map(str, newest)).encode())
    return num_pages


def warm_up(
    executor: ModelExecutor, *, progress: bool, behind: bool = False, for_one: bool = False
) -> None:
    """Compile every executable, on other threads if `behind` and the executor supports it.

    With both, `for_one` compiles only those for a single greedy answer.
    """
    if behind and executor.warm_up_behind(for_one=for_one):
        return
    steps = executor.warmup_steps()
    with tqdm(
        total=len(steps), desc="compiling", leave=False, delay=2, disable=not progress
    ) as bar:
        if executor.prepares_in_parallel:
            measuring = [step for step in steps if step[0].startswith(_RUN)]
            preparing = [step for step in steps if step not in measuring]
            for name in Preparation(preparing).finished():
                bar.set_postfix_str(name)
                bar.update()
            steps = measuring
        for name, compile_step in steps:
            bar.set_postfix_str(name)
            compile_step()
            bar.update()
    executor.finish_warmup()
