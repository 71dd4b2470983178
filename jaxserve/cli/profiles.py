"""Measured times that `jaxserve plan` keeps in the cache folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jaxserve.cli import options as opt
from jaxserve.core.assets import cache_errors, cache_folder
from jaxserve.core.errors import InvalidProfileError

if TYPE_CHECKING:
    from jaxserve.core.config import EngineConfig
    from jaxserve.planning import StepTimes
    from jaxserve.planning.schedules import TaskLengths
    from jaxserve.runtime import Runtime


def step_times(
    given: Path | None,
    lengths: TaskLengths,
    *,
    measure_again: bool,
    model: str,
    quiet: bool,
    **settings: Any,
) -> tuple[StepTimes, EngineConfig]:
    """Return the step times of a model's engine, and the engine's configuration.

    They are read from `given`, or from the cache folder, or else measured and kept there.

    Args:
      given: a file that `StepTimes.save` wrote; None for the cache folder.
      lengths: those of the requests, which must fit in the engine's context.
      settings: of `options.open_service`.

    Raises:
      InvalidConfigError: the lengths do not fit.
      InvalidProfileError: `given` is damaged, or was measured on something else.
    """
    from jaxserve.planning.schedules.frontier import check_context

    with _opened(model, quiet, settings, warmup=False) as rt:
        check_context(lengths, rt.config)
        if given is not None:
            return rt.load_step_times(given), rt.config
        path = _path(model, rt, settings.get("tensor_parallel", 1))
        if path.is_file() and not measure_again:
            try:
                return rt.load_step_times(path), rt.config
            except InvalidProfileError as error:
                typer.echo(f"measuring again: {error}", err=True)
    # Executables are compiled before they are timed.
    with _opened(model, quiet, settings, warmup=True) as rt:
        times = rt.measure_step_times()
        with cache_errors(f"keeping {path.name}"):
            times.save(path)
        return times, rt.config


def _opened(model: str, quiet: bool, settings: dict[str, Any], *, warmup: bool) -> Any:
    return opt.open_service(model, quiet=quiet, warmup=warmup, **settings)


def _path(model: str, rt: Runtime, tensor_parallel: int) -> Path:
    """Return the file of an engine's step times; another device, size or version has another."""
    import jax

    from jaxserve.core.host import cpu_name

    device = jax.devices()[0]
    parts = (
        asdict(rt.model_config),
        {**asdict(rt.config), "num_pages": 0, "num_host_pages": 0},
        (device.platform, device.device_kind, cpu_name(), tensor_parallel, jax.__version__),
    )
    digest = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"steps-{Path(model).stem}-{digest}.json"
