"""Loading of a checkpoint for a runtime."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
from jax.sharding import Mesh

from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.build import platform_defaults
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.warmup import enable_compilation_cache
from jaxserve.runtime.build import check_early, check_quantised
from jaxserve.runtime.processes import processes_of
from jaxserve.scheduling.presets import get_policy
from pallas_kernels.cpu_targets import cpu_targets
from sharding import DeviceGroups, StagePlan

if TYPE_CHECKING:
    from jaxserve.models.store import LoadedModel


def load_for(
    options: RuntimeOptions,
    name_or_path: str,
    *,
    load: Literal["auto", "random"],
    dtype: str | None,
    mesh: Mesh | StagePlan | DeviceGroups | None,
) -> LoadedModel:
    """Load the model of a runtime with these options; see `Runtime.from_pretrained`.

    It checks the options before it reads a file. With device groups, the weights are read onto the
    encode group, from whose devices those of the decode group get theirs.
    """
    from jaxserve.models.quantisation import Quantisation
    from jaxserve.models.store import load_model

    policy = get_policy(options.policy)
    enable_compilation_cache()
    defaults = platform_defaults()
    if jax.default_backend() == "cpu":
        # On a machine's first start a compiler takes seconds; the weights are loaded meanwhile.
        threading.Thread(target=cpu_targets, name="jaxserve-kernels", daemon=True).start()
    group = processes_of(mesh)
    check_early(options, policy, mesh, group)
    if options.quantize is not None:
        check_quantised(options, mesh)
    with (
        nullcontext() if group is None else group.together(),
        out_of_memory_as("loading the weights", "pass a smaller dtype or a smaller model"),
    ):
        return load_model(
            name_or_path,
            dtype=dtype or defaults.dtype,
            load=load,
            seed=options.seed,
            layer_layout=cast(Any, defaults.layer_layout),
            mesh=mesh,
            quantisation=Quantisation.of(options),
            progress=options.progress,
        )
