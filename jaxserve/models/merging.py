"""Adapters that are merged into the weights of a model: LoRA, rsLoRA and DoRA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float32

from jaxserve.core.errors import InvalidConfigError, InvalidParamsError
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.adapter_layout import Path as ParamPath
from jaxserve.models.adapter_source import AdapterSource
from jaxserve.models.decoder import Decoder
from jaxserve.models.linear import WeightAxes


def merge_adapter(
    model: Decoder, source: str | Path | Mapping[str, Any], *, scale: float | None = None
) -> nnx.State:
    """Return a model's parameters with an adapter merged into them, for `Runtime.update_params`.

    A LoRA changes W [out, in] to V = W + scale * B @ A, and a DoRA (arXiv:2402.09353, section 4) to
    m * V / |V|, where |V| is the norm of each row. It is computed in float32, on the host, weight
    by weight. The result has the dtypes and the places of the model's parameters, and shares those
    that the adapter does not change. The model is unchanged.

    Args:
      model: with dense weights.
      source: see `Runtime.load_adapter`. The magnitudes m of a DoRA [out] have PEFT's names, such
        as `model.layers.0.self_attn.q_proj.lora_magnitude_vector`.
      scale: factor of B @ A, for arrays; a folder has its own.

    Raises:
      InvalidParamsError: the adapter does not fit the model, is of a kind that cannot be merged
        here, or gives numbers that are not finite.
      InvalidConfigError: the model's weights are not dense.
    """
    adapter = AdapterSource.of(source, scale, merges=True)
    rescaled = _magnitudes(adapter, model)
    layout = _layout(model, adapter.rank)
    arrays = layout.values(adapter, limits_rank=False).arrays
    params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, axes in layout.weight_axes.items():
        name = ".".join(map(str, path))
        if path not in params:
            raise InvalidConfigError(
                f"{name} is not dense; pass a model that was loaded without quantisation"
            )
        rescaling = rescaled.get(path)
        if not arrays[*path, "a"].any() and rescaling is None:
            continue
        old: jax.Array = params[path].get_value()
        with np.errstate(all="ignore"):  # what is not finite is an error below
            new = np.asarray(old, np.float32) + layout.change(path, arrays)
            if rescaling is not None:
                new = _rescaled(new, axes, *rescaling)
            new = new.astype(old.dtype)
        if not np.isfinite(new).all():
            raise InvalidParamsError(
                f"{name} with the adapter of {adapter.where} has NaN or infinite numbers; pass the "
                "adapter of this model"
            )
        params[path] = params[path].replace(jax.device_put(new, old.sharding))
    return nnx.from_flat_state(list(params.items()))


def _layout(model: Decoder, max_rank: int) -> AdapterLayout:
    return AdapterLayout(
        model.config, model.layer_layout, num_adapters=1, max_rank=max(1, max_rank), dtype="float32"
    )


def _magnitudes(
    adapter: AdapterSource, model: Decoder
) -> dict[ParamPath, tuple[Float32[np.ndarray, ...], Bool[np.ndarray, ...]]]:
    """Return the magnitudes of a DoRA by the weight's path, and which outputs have one.

    Both have the weight's axes without those that a product sums over. A weight without magnitudes
    is left out. Raises InvalidParamsError if matrices and magnitudes do not match.
    """
    found = adapter.magnitudes
    if not found:
        return {}
    widths = {
        name.removesuffix(".lora_A.weight"): shape[-1]
        for name, shape in adapter.shapes().items()
        if name.endswith(".lora_A.weight")
    }
    if unpaired := sorted(found.keys() ^ widths.keys()):
        raise InvalidParamsError(
            f"the DoRA of {adapter.where} has lora_A or lora_magnitude_vector, and not both, of "
            f"{', '.join(unpaired[:5])}; pass a whole one"
        )
    wrong = [
        f"{module}.lora_magnitude_vector has shape {m.shape} instead of {outputs}"
        for module, m in found.items()
        if m.shape != (outputs := adapter.shapes().get(f"{module}.lora_B.weight", ())[:1])
    ]
    if wrong:
        raise InvalidParamsError(
            f"the DoRA of {adapter.where} does not fit this model: {'; '.join(wrong[:5])}. Pass "
            "the adapter of this model"
        )
    # They have the layout of B with rank 1.
    layout = _layout(model, 1)
    kinds = []
    for kind in (lambda m: m, np.ones_like):
        columns = {
            f"{module}.lora_B.weight": kind(m.astype(np.float32)).reshape(-1, 1)
            for module, m in found.items()
        }
        rows = {
            f"{module}.lora_A.weight": np.ones((1, width), np.float32)
            for module, width in widths.items()
        }
        kinds.append(layout.values(AdapterSource(columns | rows, 1.0, adapter.where)).arrays)
    magnitudes, ones = (
        {path: kind[*path, "b"].sum(axes.num_stacked) for path, axes in layout.weight_axes.items()}
        for kind in kinds
    )
    return {path: (magnitudes[path], ones[path] > 0) for path in ones if ones[path].any()}


def _rescaled(
    weight: Float32[np.ndarray, ...],  # [*stacked, *in, *out]
    axes: WeightAxes,
    magnitude: Float32[np.ndarray, ...],  # [*stacked, *out]
    has_one: Bool[np.ndarray, ...],  # [*stacked, *out]
) -> Float32[np.ndarray, ...]:
    """Return the weight with these norms of the outputs that have one."""
    summed = tuple(range(axes.num_stacked, axes.num_stacked + axes.num_in))
    norm = np.sqrt(np.square(weight).sum(summed))
    ratio = np.where(has_one, magnitude / norm, np.float32(1))
    return weight * np.expand_dims(ratio, summed)
