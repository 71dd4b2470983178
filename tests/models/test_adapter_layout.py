"""Adapters in the layout of each family, beside NumPy's W + scale * B @ A of the checkpoint."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.errors import InvalidParamsError
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.adapter_source import AdapterSource
from jaxserve.models.adapters import AdaptedWeight
from jaxserve.models.families import family_of
from jaxserve.models.linear import Linear
from tests.common.tiers import some
from tests.models.adapter_checkpoints import (
    FAMILIES,
    RANK,
    SCALE,
    adapter_of,
    checkpoint_of,
    config_of,
    folder_of,
    merged_checkpoint,
    params_of,
)

MAX_RANK = 4


def _layout(config, layer_layout="unrolled", dtype: str | None = None) -> AdapterLayout:
    return AdapterLayout(config, layer_layout, num_adapters=2, max_rank=MAX_RANK, dtype=dtype)


@pytest.mark.parametrize(
    ("variant", "layer_layout"),
    some(
        [
            *((variant, "unrolled") for variant in FAMILIES),
            ("llama", "scanned"),
            ("gptj", "scanned"),
        ],
        *range(5),
    ),
)
def test_an_adapter_is_the_change_that_peft_makes(variant, layer_layout):
    """Each weight plus scale * a @ b is the weight that the merged checkpoint gives."""
    config = config_of(variant)
    rng = np.random.default_rng(0)
    checkpoint = checkpoint_of(config, rng)
    adapter = adapter_of(checkpoint, variant, rng)
    layout = _layout(config, layer_layout)
    values = layout.values(AdapterSource(adapter, SCALE))
    before = params_of(config, checkpoint, layer_layout)
    after = params_of(config, merged_checkpoint(checkpoint, adapter, variant), layer_layout)
    changed = {path for path in before if not np.array_equal(before[path][...], after[path][...])}
    assert changed == {path[:-1] for path in values.arrays}
    for path in changed:
        wanted = np.asarray(after[path][...]) - np.asarray(before[path][...])
        got = layout.change(path, values.arrays)
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_product_is_pefts_formula():
    """x W^T + scale * (x A^T) B^T for one adapter, in NumPy; nothing is added without one."""
    rng = np.random.default_rng(1)
    config = config_of("llama")
    layout = _layout(config)
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    model = family_of(config).decoder(config, rngs=nnx.Rngs(0))
    weight = np.asarray(model.blocks[1].mlp.down[...])
    layout.adapt(model)
    params = nnx.state(model, nnx.Param)
    values = layout.values(AdapterSource(adapter, SCALE))
    arrays = {}
    for part in layout.put(layout.arrays_of(params), 1, values.arrays):
        assert part.keys().isdisjoint(arrays)
        arrays |= part
    for path, variable in nnx.to_flat_state(layout.state(arrays)):
        if path[:4] == ("blocks", 1, "mlp", "down"):
            getattr(model.blocks[1].mlp.down, path[4])[...] = variable.get_value()
    down = model.blocks[1].mlp.down
    assert isinstance(down, AdaptedWeight)
    x = rng.standard_normal((6, weight.shape[0])).astype(np.float32)
    of_rows = np.array([1, -1, 0, 1, -1, 1], np.int32)
    got = Linear(down)(jnp.asarray(x), jnp.asarray(of_rows))
    a, b = (adapter[f"model.layers.1.mlp.down_proj.lora_{each}.weight"] for each in "AB")
    added = SCALE * (x @ a.T) @ b.T
    wanted = x @ weight + np.where(of_rows[:, None] == 1, added, 0)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_outputs_of_a_fused_weight_have_the_matrices_of_their_own_module():
    """`b` has the columns of q, k and v beside each other, in the order of the weight's heads."""
    config = config_of("llama")
    rng = np.random.default_rng(4)
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    layout = _layout(config)
    arrays = layout.values(AdapterSource(adapter, SCALE)).arrays
    path = ("blocks", 0, "attention", "wqkv")
    heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    a, b = arrays[*path, "a"], arrays[*path, "b"]
    assert a.shape == (config.hidden_size, 3 * MAX_RANK)
    assert b.shape == (MAX_RANK, heads, group + 2, config.head_dim)
    found = adapter["model.layers.0.self_attn.k_proj.lora_B.weight"]
    wanted = found.reshape(heads, config.head_dim, RANK).transpose(2, 0, 1)
    np.testing.assert_array_equal(b[:RANK, :, group], wanted)
    found = adapter["model.layers.0.self_attn.k_proj.lora_A.weight"]
    np.testing.assert_array_equal(a[:, MAX_RANK : MAX_RANK + RANK], found.T)


def test_matrices_have_the_dtype_that_is_asked_for():
    """Those of a model too, which then need half of the memory; scales stay in float32."""
    config = config_of("llama")
    rng = np.random.default_rng(5)
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    source = AdapterSource(adapter, SCALE)
    wanted = _layout(config).values(source).arrays
    layout = _layout(config, dtype="bfloat16")
    model = family_of(config).decoder(config, rngs=nnx.Rngs(0))
    layout.adapt(model)
    kept = layout.arrays_of(nnx.state(model, nnx.Param))
    for path, array in layout.values(source).arrays.items():
        assert array.dtype == kept[path].dtype == ("float32" if path[-1] == "scale" else "bfloat16")
        np.testing.assert_array_equal(array, wanted[path].astype(array.dtype))


@pytest.mark.parametrize(("is_rslora", "scale"), [(False, 6 / RANK), (True, 6 / RANK**0.5)])
def test_a_folder_of_peft_gives_the_same(tmp_path, is_rslora, scale):
    """Names have PEFT's prefix, and the scale is alpha / r, or alpha / sqrt(r) for rsLoRA."""
    rng = np.random.default_rng(2)
    config = config_of("llama")
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    layout = _layout(config)
    got = layout.values(AdapterSource.of(folder_of(tmp_path, adapter, use_rslora=is_rslora), None))
    short = {name.removesuffix(".weight"): array for name, array in adapter.items()}
    wanted = layout.values(AdapterSource.of(short, scale))
    assert got.identity == wanted.identity
    assert got.identity != layout.values(AdapterSource(adapter, 2 * scale)).identity


@pytest.mark.parametrize("is_rslora", [False, True])
def test_modules_have_the_factors_that_their_patterns_say(tmp_path, is_rslora):
    """The first expression that matches the end of a module's name counts, as in PEFT 0.21.2."""
    rng = np.random.default_rng(2)
    config = config_of("llama")
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    for name, array in adapter.items():
        rank = 1 if "q_proj" in name else 2 if "layers.1." in name and "k_proj" in name else RANK
        cut = array[:rank] if "lora_A" in name else array[:, :rank]
        adapter[name] = np.ascontiguousarray(cut)
    folder = folder_of(
        tmp_path,
        adapter,
        use_rslora=is_rslora,
        rank_pattern={r"layers\.1\..*k_proj": 2, "q_proj": 1},
        alpha_pattern={"k_proj": 9, "up_proj": 12},
    )
    root = np.sqrt if is_rslora else float
    scaled = {}
    for name, array in adapter.items():
        rank = 1 if "q_proj" in name else 2 if "layers.1." in name and "k_proj" in name else RANK
        alpha = 9 if "k_proj" in name else 12 if "up_proj" in name else 6
        scaled[name] = array * np.float32(alpha / root(rank)) if "lora_B" in name else array
    layout = _layout(config)
    got = layout.values(AdapterSource.of(folder, None)).arrays
    wanted = layout.values(AdapterSource.of(scaled, 1.0)).arrays
    for path, array in wanted.items():
        if path[-1] == "b":
            own = got[path] * got[(*path[:-1], "scale")].reshape(-1, 1)[0]
            np.testing.assert_allclose(own, array, rtol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ({"layers.1.q_proj": 2, "q_proj": 1}, True),
        ({"q_proj": 1, "layers.1.q_proj": 2}, False),  # the first match is of rank 1
        ({".*1.q_proj": 2, "q_proj": 1}, True),
        ({"1.q_proj": 2}, False),  # that of layer 0 has rank r
        ({"_proj": 1}, False),  # no end of a module's name
        ({}, False),
    ],
    ids=str,
)
def test_ranks_are_those_of_the_first_pattern_that_matches(tmp_path, pattern, fits):
    """Where a matrix has another rank, PEFT 0.21.2 refuses the folder; its scale is not known.

    `get_pattern_key` takes the first key of the file, which `save_pretrained` has sorted.
    """
    matrices = {"model.layers.0.q_proj": 1, "model.layers.1.q_proj": 2}
    arrays = {f"{n}.lora_A.weight": np.zeros((r, 4), np.float32) for n, r in matrices.items()}
    folder = folder_of(tmp_path, arrays, rank_pattern=pattern)
    if fits:
        assert AdapterSource.of(folder, None).rank == 2
    else:
        with pytest.raises(InvalidParamsError, match="whose first match counts, say"):
            AdapterSource.of(folder, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"peft_type": "IA3"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"q_proj": "much"}},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "an initialisation of tomorrow"},
        {"alora_invocation_tokens": [3, 4]},
        {"use_qalora": True},
        {"arrow_config": {"top_k": 3}},
        {"a_setting_of_tomorrow": 1},
        {"r": 0},
        {"r": float("inf")},
        {"r": 10**400},
        {"rank_pattern": {"q_proj": 10**400}},
        {"lora_alpha": None},
        {"lora_alpha": 10**400},
        {"lora_alpha": float("inf"), "alpha_pattern": {"q_proj": 1}},
        {"alpha_pattern": {"q_proj": float("nan")}},
    ],
    ids=lambda settings: f"{settings!s:.60}",
)
def test_other_kinds_of_adapters_are_refused(tmp_path, settings):
    """The message names the setting, or says what a folder must have."""
    folder = folder_of(tmp_path, {"x.lora_A.weight": np.zeros((2, 2), np.float32)}, **settings)
    known = f"{next(iter(settings))}|TypeError|OverflowError|much"
    with pytest.raises(InvalidParamsError, match=known):
        AdapterSource.of(folder, None)


def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path):
    """Python's JSON cannot read it, which is no failure of the server."""
    folder = folder_of(tmp_path, {"x.lora_A.weight": np.zeros((2, 2), np.float32)})
    (folder / "adapter_config.json").write_text('{"r": ' + "[" * 100_000)
    with pytest.raises(InvalidParamsError, match="RecursionError"):
        AdapterSource.of(folder, None)


# What PEFT 0.17 writes for an adapter of all defaults, and values that change nothing.
AS_WRITTEN: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.0,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["v_proj", "q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_dropout": 0.1, "layers_to_transform": [0], "fan_in_fan_out": True},
        *({"init_lora_weights": value} for value in (False, "gaussian", "eva", "orthogonal")),
        {"a_setting_of_tomorrow": None, "another_one": False},
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_allowed(tmp_path, settings):
    """All that PEFT writes by default, and how an adapter was trained."""
    folder = folder_of(tmp_path, {"x.lora_A.weight": np.zeros((RANK, 2))}, **AS_WRITTEN | settings)
    assert AdapterSource.of(folder, None).scale == 6 / RANK


def test_sources_that_are_none_are_refused(tmp_path):
    """No folder, arrays without a scale, a folder with one, and a scale that is no number."""
    with pytest.raises(InvalidParamsError, match="not an adapter of PEFT"):
        AdapterSource.of(tmp_path / "nowhere", None)
    with pytest.raises(InvalidParamsError, match="need scale="):
        AdapterSource.of({}, None)
    with pytest.raises(InvalidParamsError, match="omit it"):
        AdapterSource.of(tmp_path, 1.0)
    for scale, said in ((float("nan"), "scale=nan"), ("x", "scale='x'"), (True, "scale=True")):
        with pytest.raises(InvalidParamsError, match=said):
            AdapterSource.of({}, scale)
    twice = {"x.lora_A.weight": np.zeros(1), "base_model.model.x.lora_A.weight": np.ones(1)}
    with pytest.raises(InvalidParamsError, match="'x.lora_A.weight' twice"):
        AdapterSource.of(twice, 1.0)


def _wrong(adapter: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    first = "model.layers.0.self_attn.q_proj."
    a, b = f"{first}lora_A.weight", f"{first}lora_B.weight"
    changed = dict(adapter)
    if kind == "missing":
        del changed[b]
    elif kind == "rank":
        changed[a] = np.zeros((MAX_RANK + 1, adapter[a].shape[1]), np.float32)
        changed[b] = np.zeros((adapter[b].shape[0], MAX_RANK + 1), np.float32)
    elif kind == "shape":
        changed[b] = adapter[b][:-1]
    elif kind == "unknown":
        changed["lm_head.lora_A.weight"] = adapter[a]
    elif kind == "nan":
        changed[a] = adapter[a] * np.nan
    else:
        changed = {}
    return changed


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "q_proj.lora_B.weight is missing"),
        ("rank", "has rank 5, and 4 is the maximum"),
        ("shape", r"q_proj.lora_B.weight has shape \(95, 3\) instead of \(96, 3\)"),
        ("unknown", "lm_head.lora_A.weight belongs to no weight"),
        ("nan", "NaN or infinite"),
        ("none", "no matrix lora_A"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(kind, message):
    """The message says which matrix is wrong, and what is allowed."""
    rng = np.random.default_rng(3)
    config = config_of("llama")
    adapter = adapter_of(checkpoint_of(config, rng), "llama", rng)
    with pytest.raises(InvalidParamsError, match=message):
        _layout(config).values(AdapterSource(_wrong(adapter, kind), SCALE))
