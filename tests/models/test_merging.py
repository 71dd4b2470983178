"""Adapters that are merged, beside PEFT's formulas on the checkpoint's tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flax import nnx

from jaxserve import merge_adapter
from jaxserve.core.errors import InvalidConfigError, InvalidParamsError
from jaxserve.models.families import family_of
from jaxserve.models.loading import abstract_model
from jaxserve.models.quantisation import Quantisation, Quantiser
from jaxserve.testing import tiny_llama
from tests.common.tiers import some
from tests.models.adapter_checkpoints import (
    FAMILIES,
    RANK,
    RECURRENT,
    SCALE,
    adapter_of,
    checkpoint_of,
    config_of,
    folder_of,
    magnitudes_of,
    merged_checkpoint,
    params_of,
)


def _made(variant: str, seed: int, *, has_magnitudes: bool, layer_layout="unrolled"):
    """Return a configuration, a checkpoint, an adapter of all its matrices, and the model."""
    config, rng = config_of(variant), np.random.default_rng(seed)
    checkpoint = checkpoint_of(config, rng)
    adapter = adapter_of(checkpoint, variant, rng)
    if has_magnitudes:
        adapter |= magnitudes_of(adapter, rng)
    graphdef, _ = abstract_model(config, layer_layout=layer_layout)
    params = nnx.from_flat_state(list(params_of(config, checkpoint, layer_layout).items()))
    return config, checkpoint, adapter, nnx.merge(graphdef, params)


def _check(params: nnx.State, wanted) -> None:
    got = dict(nnx.to_flat_state(params))
    assert got.keys() == wanted.keys()
    for path, variable in got.items():
        np.testing.assert_allclose(
            variable[...], wanted[path][...], rtol=1e-4, atol=1e-5, err_msg=str(path)
        )


@pytest.mark.parametrize("has_magnitudes", some([False, True]), ids=["lora", "dora"])
@pytest.mark.parametrize(
    ("variant", "layer_layout"),
    [
        *((variant, "unrolled") for variant in FAMILIES),
        *some([(variant, "unrolled") for variant in RECURRENT]),
        *(("llama", "scanned"), ("gptj", "scanned")),
    ],
)
def test_the_parameters_are_those_of_the_merged_checkpoint(variant, layer_layout, has_magnitudes):
    """In all families, whose weights are fused, ordered and transposed differently."""
    config, checkpoint, adapter, model = _made(
        variant, 0, has_magnitudes=has_magnitudes, layer_layout=layer_layout
    )
    wanted = params_of(config, merged_checkpoint(checkpoint, adapter, variant), layer_layout)
    _check(merge_adapter(model, adapter, scale=SCALE), wanted)


@pytest.mark.parametrize("ending", some(["", ".weight"]))
@pytest.mark.parametrize(("is_rslora", "scale"), [(False, 6 / RANK), (True, 6 / RANK**0.5)])
def test_a_folder_of_a_dora_is_merged(tmp_path, is_rslora, scale, ending):
    """With modules that have no adapter, which stay; a part of a fused weight among them."""
    config, checkpoint, adapter, model = _made("llama", 1, has_magnitudes=True)
    some = {name: array for name, array in adapter.items() if ".k_proj." not in name}
    named = {
        name + ending * name.endswith("lora_magnitude_vector"): array
        for name, array in some.items()
    }
    folder = folder_of(tmp_path, named, use_dora=True, use_rslora=is_rslora)
    wanted = params_of(config, merged_checkpoint(checkpoint, some, "llama", scale))
    before = nnx.state(model, nnx.Param)
    _check(merge_adapter(model, folder), wanted)
    _check(before, dict(nnx.to_flat_state(nnx.state(model, nnx.Param))))


def test_a_merged_dora_gives_the_products_of_pefts_layer():
    """What PEFT adds to a product, in PyTorch: x W + (m / n - 1) x W + (m / n) s (x A) B."""
    _, checkpoint, adapter, model = _made("llama", 2, has_magnitudes=True)
    module = "model.layers.1.mlp.down_proj"
    base, a, b, magnitude = (
        torch.from_numpy(array)
        for array in (
            checkpoint[f"{module}.weight"],
            *(adapter[f"{module}.lora_{each}.weight"] for each in "AB"),
            adapter[f"{module}.lora_magnitude_vector"],
        )
    )
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, base.shape[1]), np.float32))
    plain = torch.nn.functional.linear(x, base)
    norm = torch.linalg.norm(base + SCALE * (b @ a), dim=1)
    ratio = (magnitude / norm).view(1, -1)
    wanted = plain + (ratio - 1) * plain + ratio * SCALE * (x @ a.T @ b.T)
    down = merge_adapter(model, adapter, scale=SCALE)["blocks"][1]["mlp"]["down"][...]
    np.testing.assert_allclose(x.numpy() @ np.asarray(down), wanted.numpy(), rtol=1e-4, atol=1e-4)


def test_unchanged_parameters_are_shared():
    """An adapter of one matrix gives one new array, in the dtype of the model."""
    _, _, adapter, model = _made("llama", 3, has_magnitudes=False)
    one = {name: array for name, array in adapter.items() if "layers.1.mlp.down_proj" in name}
    before = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    after = dict(nnx.to_flat_state(merge_adapter(model, one, scale=SCALE)))
    assert {p for p in after if after[p].get_value() is not before[p].get_value()} == {
        ("blocks", 1, "mlp", "down")
    }


@pytest.mark.release
def test_a_model_in_bfloat16_stays_so():
    """It is merged in float32, and rounded once."""
    config, rng = config_of("llama"), np.random.default_rng(4)
    model = family_of(config).decoder(config, rngs=nnx.Rngs(0))
    small = family_of(config).decoder(
        type(config)(**{**vars(config), "dtype": "bfloat16"}), rngs=nnx.Rngs(0)
    )
    nnx.update(small, nnx.state(model, nnx.Param))
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    whole = dict(nnx.to_flat_state(merge_adapter(model, adapter, scale=SCALE)))
    for path, variable in nnx.to_flat_state(merge_adapter(small, adapter, scale=SCALE)):
        np.testing.assert_array_equal(variable[...], whole[path][...].astype(variable[...].dtype))


@pytest.mark.parametrize(
    ("settings", "drops", "message"),
    [
        ({"use_dora": True}, "lora_magnitude_vector", "0 vectors lora_magnitude_vector"),
        ({"use_dora": False}, "nothing", "use_dora=False"),
        ({"use_dora": True}, "0.mlp.up_proj.lora_magnitude_vector", "layers.0.mlp.up_proj"),
        ({"use_dora": True}, "0.mlp.up_proj.lora_", "no problem"),
        ({"use_dora": True, "bias": "all"}, "nothing", "'bias': 'all'"),
        ({"use_dora": True, "init_lora_weights": "pissa"}, "nothing", "'pissa'"),
    ],
    ids=str,
)
def test_folders_that_are_not_whole_are_refused(tmp_path, settings, drops, message):
    """And those whose settings merging does not know either."""
    _, _, adapter, model = _made("llama", 5, has_magnitudes=True)
    kept = {name: array for name, array in adapter.items() if drops not in name}
    folder = folder_of(tmp_path, kept, **settings)
    if message == "no problem":
        merge_adapter(model, folder)
        return
    with pytest.raises(InvalidParamsError, match=message):
        merge_adapter(model, folder)


def test_what_cannot_be_merged_is_refused():
    """An adapter of another model, numbers that are not finite, and weights in panels."""
    _, _, adapter, model = _made("llama", 6, has_magnitudes=True)
    with pytest.raises(InvalidParamsError, match="belongs to no weight"):
        merge_adapter(model, {"lm_head.lora_A": np.ones((2, 2))}, scale=1.0)
    name = next(name for name in adapter if name.endswith("lora_magnitude_vector"))
    longer = {**adapter, name: np.append(adapter[name], np.float32(1))}
    with pytest.raises(InvalidParamsError, match=rf"{name.split('.')[-1]} has shape .* instead of"):
        merge_adapter(model, longer, scale=1.0)
    zero = {**adapter, **{name: 0 * adapter[name] for name in adapter if "lora_m" in name}}
    infinite = {name: array * np.float32(1e30) for name, array in zero.items()}
    with pytest.raises(InvalidParamsError, match="NaN or infinite"):
        merge_adapter(model, infinite, scale=1.0)
    tiny = tiny_llama()
    panelled = Quantiser(tiny, Quantisation.in_panels(None)).model(nnx.state(tiny, nnx.Param))
    named = {"model.layers.0.mlp.down_proj.lora_A": np.ones((1, 64))}
    named["model.layers.0.mlp.down_proj.lora_B"] = np.ones((32, 1))
    with pytest.raises(InvalidConfigError, match="not dense"):
        merge_adapter(panelled, named, scale=1.0)
