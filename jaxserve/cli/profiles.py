"""Measured times that `jaxserve plan` keeps in the cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import typer

from jaxserve.cli.opening import open_service
from jaxserve.core.assets import cache_errors, cache_folder
from jaxserve.core.errors import InvalidConfigError, InvalidProfileError

if TYPE_CHECKING:
    from jaxserve.core.config import EngineConfig
    from jaxserve.models.config import DecoderConfig
    from jaxserve.planning import GroupTimes, StepTimes
    from jaxserve.planning.layers import LayerOrigin
    from jaxserve.planning.schedules import Deployment, TaskLengths


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
      settings: of `opening.open_service`.

    Raises:
      InvalidConfigError: the lengths do not fit.
      InvalidProfileError: `given` is damaged, or was measured on something else.
    """
    from jaxserve.planning import keep_step_times

    kind = _Kind(
        load=lambda rt, path: rt.load_step_times(path),
        find=lambda rt, folder: rt.find_step_times(folder),
        measure=lambda rt: rt.measure_step_times(),
        keep=keep_step_times,
    )
    return _times(kind, given, lengths, measure_again, model, quiet, settings)


def group_times(
    given: Path | None,
    lengths: TaskLengths,
    *,
    measure_again: bool,
    model: str,
    quiet: bool,
    **settings: Any,
) -> tuple[GroupTimes, EngineConfig]:
    """Return the step times of a model's two groups of devices; see `step_times`.

    Args:
      given: a file that `GroupTimes.save` wrote; None for the cache folder.
      settings: of `opening.open_service`, with `groups`.
    """
    from jaxserve.planning import keep_group_times

    kind = _Kind(
        load=lambda rt, path: rt.load_group_times(path),
        find=lambda rt, folder: rt.find_group_times(folder),
        measure=lambda rt: rt.measure_group_times(),
        keep=keep_group_times,
    )
    settings = {**settings, "policy": "exegpt_waa_c"}
    return _times(kind, given, lengths, measure_again, model, quiet, settings)


@final
@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How a runtime loads, finds in a folder, and measures its times, and how these are kept."""

    load: Callable[[Any, Path], Any]
    find: Callable[[Any, Path], Any]
    measure: Callable[[Any], Any]
    keep: Callable[[Path, Any], Path]


def _times(
    kind: _Kind,
    given: Path | None,
    lengths: TaskLengths,
    measure_again: bool,
    model: str,
    quiet: bool,
    settings: dict[str, Any],
) -> tuple[Any, EngineConfig]:
    """Return times of one kind and the engine's configuration; see `step_times`."""
    folder = cache_folder() / "profiles"
    with _opened(model, quiet, settings, warmup=False) as rt:
        lengths.check_fits(rt.config)
        if given is not None:
            return kind.load(rt, given), rt.config
        kept = None if measure_again else kind.find(rt, folder)
        if kept is not None:
            return kept, rt.config
    # Executables are compiled before they are timed.
    with _opened(model, quiet, settings, warmup=True) as rt:
        times = kind.measure(rt)
        with cache_errors("keeping step times"):
            kind.keep(folder, times)
        return times, rt.config


def layer_deployment(
    given: Path | None,
    lengths: TaskLengths,
    *,
    measure_again: bool,
    model: str,
    quiet: bool,
    num_devices: int | None,
    dtype: str | None,
    kv_dtype: str | None,
    quantize: str | None,
    quantize_embeddings: str | None,
    max_slots: int | None,
    max_context: int | None,
) -> Deployment:
    """Return a model on this machine's devices, by measured layers; reads no weights.

    The profile is read from `given`, or from the cache folder, and what it lacks is measured.

    Args:
      given: a file that is complete; None for the cache folder.
      num_devices: devices to plan for; None for all.

    Raises:
      InvalidConfigError: the lengths do not fit, there are fewer devices, or the model has
        recurrent layers.
      InvalidProfileError: `given` is damaged, or was measured on something else.
    """
    import jax

    from jaxserve.execution.compilation import enable_compilation_cache
    from jaxserve.execution.sizes import platform_defaults
    from jaxserve.planning.layers import (
        LayerBench,
        LayerOrigin,
        LayerProfile,
        LayerSizes,
        free_bytes_of,
        layers_deployment,
        measure_layers,
    )

    config = replace(_model_config(model, quiet), dtype=dtype or platform_defaults().dtype)
    lengths.check_context(config.max_position_embeddings)
    devices = jax.devices()
    num = len(devices) if num_devices is None else num_devices
    if not 1 <= num <= len(devices):
        raise InvalidConfigError(
            f"--devices {num} is not allowed; this machine has {len(devices)}. XLA_FLAGS="
            "--xla_force_host_platform_device_count=8 makes eight host devices"
        )
    sizes = LayerSizes.of(config, max_length=max_context, kv_dtype=kv_dtype)
    given_sizes: dict[str, Any] = {
        "max_batch": max_slots,
        "quantize": quantize,
        "quantize_embeddings": quantize_embeddings,
    }
    sizes = replace(sizes, **{name: x for name, x in given_sizes.items() if x is not None})
    origin = LayerOrigin.of(config, devices, sizes)
    if given is not None:
        profile = LayerProfile.load(given, expected=origin)
    else:
        path = layers_path(model, origin)
        profile = LayerProfile(origin, path=path)
        if path.is_file() and not measure_again:
            try:
                profile = LayerProfile.load(path, expected=origin)
            except InvalidProfileError as error:
                typer.echo(f"measuring again: {error}", err=True)
        bench = LayerBench(config, sizes, devices)
        if not profile.is_complete:
            enable_compilation_cache()
            with cache_errors(f"keeping {path.name}"):
                measure_layers(bench, profile, progress=not quiet)
    mean = lengths.inputs.mean
    memory_bytes = free_bytes_of(devices[:num])
    return layers_deployment(profile, config, num, memory_bytes, num_input_tokens=mean)


def layers_path(model: str, origin: LayerOrigin) -> Path:
    """Return the file in the cache folder for measured layers of an origin."""
    digest = hashlib.sha256(json.dumps(asdict(origin), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"layers-{Path(model).stem}-{digest}.json"


def _model_config(model: str, quiet: bool) -> DecoderConfig:
    """Return a model's configuration, without its weights."""
    from jaxserve.models import registry
    from jaxserve.models.families import config_from_hf

    registry.resolve(model).fetch(weights=False, progress=not quiet)
    return config_from_hf(registry.show(model)["config"])


def _opened(model: str, quiet: bool, settings: dict[str, Any], *, warmup: bool) -> Any:
    return open_service(model, quiet=quiet, warmup=warmup, **settings)
