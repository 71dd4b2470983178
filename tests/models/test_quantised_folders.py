"""Folders of GPTQ, AWQ and compressed-tensors weights, against plain NumPy."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxserve.core.errors import CheckpointError, InvalidConfigError, UnsupportedModelError
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.quantised_folders.folder import QuantisedFolder, method_in, method_of
from jaxserve.models.safetensors_source import SafetensorsSource
from jaxserve.models.store import load_model
from jaxserve.sharding import StagePlan, make_mesh
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.models.kept_weights import dense, restored
from tests.models.quantised_checkpoints import (
    awq,
    bitsandbytes,
    compressed,
    eight_bits,
    float4,
    float8,
    gptq,
    in_blocks,
    in_e2m1,
    in_table,
    int_quantized,
    modelopt,
    pack_quantized,
    save,
    with_short_scales,
    write_folder,
    write_folders,
)
from tests.models.serving import Server

GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ4 = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
BF16, F32 = ml_dtypes.bfloat16, np.float32

# Format -> (quantization_config, what writes a module, arguments of `draw`).
FORMATS = {
    "gptq": (GPTQ4, gptq, dict(bits=4, group=32)),
    "gptq, symmetric": (GPTQ4, gptq, dict(bits=4, group=32, is_symmetric=True)),
    "gptq, one group": (GPTQ4 | {"group_size": -1}, gptq, dict(bits=4, group=-1)),
    "gptq, 8 bits": (GPTQ4 | {"bits": 8}, gptq, dict(bits=8, group=32)),
    "gptq, act order": (
        GPTQ4 | {"desc_act": True},
        gptq,
        dict(bits=4, group=32, acts_in_order=False),
    ),
    "gptq, second version": (
        GPTQ4 | {"checkpoint_format": "gptq_v2"},
        partial(gptq, one_less=False),
        dict(bits=4, group=16),
    ),
    "awq": (AWQ4, awq, dict(bits=4, group=32)),
    "awq, one group": (AWQ4 | {"group_size": -1}, awq, dict(bits=4, group=-1)),
    "packed": (
        compressed("pack-quantized", 4, 32),
        pack_quantized,
        dict(bits=4, group=32, is_symmetric=True, scale_dtype=BF16),
    ),
    "packed, asymmetric": (
        compressed("pack-quantized", 4, 8),
        pack_quantized,
        dict(bits=4, group=8, scale_dtype=BF16),
    ),
    "packed, channels": (
        compressed("pack-quantized", 4, -1),
        pack_quantized,
        dict(bits=4, group=-1, scale_dtype=BF16),
    ),
    "packed, 8 bits, act order": (
        compressed("pack-quantized", 8, 32, actorder="group"),
        pack_quantized,
        dict(bits=8, group=32, scale_dtype=F32, acts_in_order=False),
    ),
    "int8": (
        compressed("int-quantized", 8, -1),
        int_quantized,
        dict(bits=8, group=-1, is_symmetric=True, scale_dtype=BF16),
    ),
    "float8, channels": (
        compressed("float-quantized", 8, -1, type="float"),
        float8,
        dict(bits=4, group=32, change=partial(in_blocks, block=(1, -1))),
    ),
    "float8, one scale": (
        compressed("float-quantized", 8, -1, type="float", strategy="tensor"),
        float8,
        dict(bits=4, group=32, change=partial(in_blocks, block=(-1, -1))),
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", 4, 16, type="float", strategy="tensor_group"),
        float4,
        dict(bits=4, group=16, change=partial(in_e2m1, is_nvfp4=True)),
    ),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", 4, 32, type="float"),
        float4,
        dict(bits=4, group=32, change=partial(in_e2m1, is_nvfp4=False)),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        modelopt,
        dict(bits=4, group=16, change=partial(in_e2m1, is_nvfp4=True, has_power=True)),
    ),
    "modelopt, float8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        float8,
        dict(bits=4, group=32, change=partial(in_blocks, block=(-1, -1))),
    ),
    "bitsandbytes, 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        eight_bits,
        dict(bits=8, group=-1, is_symmetric=True, scale_dtype=F32, change=with_short_scales),
    ),
    "float8, blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 32]},
        partial(float8, scale="weight_scale_inv"),
        dict(bits=4, group=32, change=partial(in_blocks, block=(24, 32))),
    ),
}
FORMATS["gptq, second version"][0]["group_size"] = 16


def _folders(parent, format: str, **more):
    config, write, drawn = FORMATS[format]
    return write_folders(parent, config, write, **drawn, **more)


def _load(path, quantize: str | None = None, **options):
    quantisation = Quantisation.of(RuntimeOptions(quantize=quantize)) if quantize else None
    return load_model(path, quantisation=quantisation, progress=False, **options)


def _source(folder) -> QuantisedFolder:
    method = method_of(json.loads((folder / "config.json").read_text()))
    assert method is not None
    return QuantisedFolder(SafetensorsSource(folder), method)


@pytest.mark.parametrize("is_nested", [False, True])
def test_bitsandbytes_folders_are_decoded(tmp_path, is_nested):
    """Their numbers are those of bitsandbytes 0.50.2, which need a table, and become dense ones."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    change = partial(in_table, is_nested=is_nested)
    folder, plain, numbers = write_folders(
        tmp_path, config, bitsandbytes, bits=4, group=32, change=change
    )
    source = _source(folder)
    for name, wanted in numbers.items():
        assert source.shapes()[name] == wanted.shape and source.matrix(name) is None
        np.testing.assert_array_equal(source.read(name), wanted)
    own, same = (_load(each) for each in (folder, plain))
    jax.tree.map(np.testing.assert_array_equal, own.params, same.params)
    stored = load_file(folder / "model.safetensors")
    lacking = {name: value for name, value in stored.items() if not name.endswith("quant_map")}
    save_file(lacking, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks \['model.*quant_map"):
        _source(folder)


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_those_of_the_format(tmp_path, format):
    """Read as a dense tensor, each weight has NumPy's numbers, whole and in part."""
    folder, _, numbers = _folders(tmp_path, format)
    source = _source(folder)
    for name, wanted in numbers.items():
        assert source.shapes()[name] == wanted.shape
        np.testing.assert_array_equal(source.read(name), wanted)
        part = (slice(3, 17), slice(8, 40))
        np.testing.assert_array_equal(source.read(name, part), wanted[part])


@pytest.mark.parametrize("format", some(FORMATS, 0, 6, 12))
def test_weights_are_loaded_without_rounding(tmp_path, format):
    """All matrices of the layers are quantised weights with the numbers of the dense folder."""
    folder, whole, _ = _folders(tmp_path, format)
    found, wanted = restored(_load(folder)), dense(_load(whole))
    assert len(found) == 2 * 4
    for path, numbers in found.items():
        np.testing.assert_array_equal(numbers, wanted[path])


@pytest.mark.parametrize(
    "format", some(["gptq, act order", "packed, asymmetric", "packed, channels"])
)
@pytest.mark.parametrize("how", some([dict(layer_layout="scanned"), dict(mesh=2)]))
def test_stacked_and_sharded_weights(tmp_path, format, how):
    """Layers that are stacked, and shards of a mesh, have the same numbers."""
    if "mesh" in how:
        how = dict(mesh=make_mesh(tensor=2))
    folder, whole, _ = _folders(tmp_path, format)
    loaded, wanted = _load(folder, **how), dense(_load(whole, **how))
    for path, numbers in restored(loaded).items():
        np.testing.assert_array_equal(numbers, wanted[path])
    if "mesh" in how:
        assert any(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(loaded.params))


@pytest.mark.parametrize(
    "format",
    some(["gptq, act order", "awq", "int8", "float8, blocks"]),
)
def test_logits_are_those_of_the_dense_model(tmp_path, format):
    """They agree to float32's rounding, and to 5 % where the kernel rounds activations."""
    folder, whole, _ = _folders(tmp_path, format)
    tokens = np.random.default_rng(1).integers(0, 101, 30)

    def logits(path, quantisation):
        loaded = load_model(path, quantisation=quantisation, progress=False)
        return Server(loaded.graphdef, loaded.params, loaded.config).step([(0, tokens)])[0]

    stored = Quantisation.stored()
    wanted = logits(whole, None)
    for rounds, tolerance in ((None, 1e-5), ("groups", 0.05)):
        got = logits(folder, replace(stored, rounds_activations=rounds))
        assert_close(got, wanted, tolerance)


def _bytes(loaded) -> int:
    """Return the bytes of the quantised weights."""
    flat = nnx.to_flat_state(loaded.params)
    kinds = ("codes", "channels", "scales", "minima", "zeros", "order")
    return sum(leaf.get_value().nbytes for path, leaf in flat if path[-1] in kinds)


@pytest.mark.parametrize(
    ("format", "bits"),
    some(
        [
            ("gptq", 4 + 24 / 32),
            ("gptq, symmetric", 4 + 16 / 32),
            ("gptq, 8 bits", 8 + 32 / 32),
            ("awq", 4 + 24 / 32),
            ("packed", 4 + 16 / 32),
            ("int8", 8),
            ("float8, channels", 8),
        ],
        0,
        3,
        5,
    ),
)
def test_memory_is_that_of_the_format(tmp_path, format, bits):
    """Codes, scales and zero points take their bits, and a float32 number for each output."""
    folder, _, numbers = _folders(tmp_path, format, hidden=128, inner=256)
    count = sum(each.size for each in numbers.values())
    outputs = sum(each.shape[0] for each in numbers.values())
    assert _bytes(_load(folder)) == count * bits / 8 + outputs * 4


@pytest.mark.parametrize("factor", [2.0**-90, 2.0**90])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_extreme_scales_and_groups_of_zeros(tmp_path, dtype, factor):
    """Scales of any magnitude, zeros and NaN are as in the folder; they get float32 if need be."""

    def change(matrix):
        scales = matrix.scales.astype(np.float32) * np.float32(factor)
        scales[3], scales[5, 1] = 0, 0
        scales[7, 1] *= 2.0**-12
        if dtype == F32:
            scales[9, 1] *= 2.0**-20
            scales[11, 0] = np.nan
        return replace(matrix, scales=scales.astype(dtype))

    drawn = dict(bits=4, group=32, scale_dtype=dtype)
    config = compressed("pack-quantized", 4, 32)
    folder, whole, _ = write_folders(tmp_path, config, pack_quantized, change=change, **drawn)
    loaded, wanted = _load(folder), dense(_load(whole))
    for path, numbers in restored(loaded).items():
        np.testing.assert_array_equal(numbers, wanted[path])
    kinds = {
        leaf.get_value().dtype
        for path, leaf in nnx.to_flat_state(loaded.params)
        if path[-1] == "scales"
    }
    assert kinds == {np.dtype(np.float16 if dtype == BF16 else np.float32)}


def test_a_mixed_folder_keeps_what_it_can(tmp_path, caplog):
    """Fused weights that differ in their order of inputs are dequantised, and a line says so."""
    config, write, drawn = FORMATS["gptq, act order"]
    folder, whole, _ = write_folders(tmp_path, config, write, **drawn)
    tensors = load_file(folder / "model.safetensors")
    other = np.random.default_rng(5).permutation(64)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name][other]
    save_file(tensors, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        loaded = _load(folder)
    assert "layers.0.self_attn.q_proj" in caplog.text and "dequantised" in caplog.text
    assert len(restored(loaded)) == 7
    wanted, found = dense(_load(whole)), dense(loaded)
    path = next(path for path in found if "wqkv" in path)
    queries = found[path].shape[1] - 2
    np.testing.assert_array_equal(found[path][:, :queries], wanted[path][:, :queries])
    assert (found[path][:, queries] != wanted[path][:, queries]).any()


def test_each_group_of_a_mixed_folder_has_its_own_format(tmp_path):
    """Packed int4 and plain int8 with a scale an output are told apart by how they are stored."""
    packed, plain = FORMATS["packed, channels"], FORMATS["int8"]
    parents = {"packed": packed, "plain": plain}
    stored, numbers = {}, {}
    for name, (config, write, drawn) in parents.items():
        (tmp_path / name).mkdir()
        folder, _, numbers[name] = write_folders(tmp_path / name, config, write, **drawn)
        stored[name] = load_file(folder / "model.safetensors")
    tensors = {k: v for k, v in stored["packed"].items() if "mlp" not in k}
    tensors |= {k: v for k, v in stored["plain"].items() if "mlp" in k}
    groups = {
        name: config["config_groups"]["group_0"] | {"format": config["format"]}
        for name, (config, _, _) in parents.items()
    }
    config = json.loads((tmp_path / "plain" / "quantised" / "config.json").read_text())
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
    write_folder(tmp_path, config, tensors)
    source = _source(tmp_path)
    for name in numbers["packed"]:
        wanted = numbers["plain" if "mlp" in name else "packed"][name]
        np.testing.assert_array_equal(source.read(name), wanted)


def test_float8_weights_need_their_scales(tmp_path):
    """One without a scale is an error, not a dense weight with other numbers."""
    folder, _, _ = _folders(tmp_path, "float8, one scale")
    tensors = _tensors(folder)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="0.mlp.up_proj.weight is in F8_E4M3"):
        _source(folder)


def test_scales_of_a_kv_cache_are_passed_over(tmp_path, caplog):
    """They are no part of the model, and a line says so."""
    folder, _, _ = _folders(tmp_path, "float8, one scale")
    name = "model.layers.0.self_attn.k_scale"
    save(_tensors(folder) | {name: np.ones(1, F32)}, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert name not in _source(folder).shapes()
    assert "1 scales of a KV cache" in caplog.text


def _tensors(folder) -> dict[str, np.ndarray]:
    source = SafetensorsSource(folder)
    return {name: source.read(name) for name in source.shapes()}


def test_biases_of_zeros_are_passed_over(tmp_path):
    """Some writers add them to every module; others that the model lacks are an error."""
    folder, _, _ = _folders(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.bias"
    for value in (0.0, 1.0):
        save_file(tensors | {name: np.full(96, value, np.float16)}, folder / "model.safetensors")
        if value == 0:
            assert len(restored(_load(folder))) == 8
        else:
            with pytest.raises(CheckpointError, match=f"surplus tensor {name}"):
                _load(folder)


def _without(name):
    return lambda tensors: tensors.pop(f"model.layers.0.mlp.down_proj.{name}")


def _cut(name):
    def change(tensors):
        name_of = f"model.layers.1.mlp.down_proj.{name}"
        tensors[name_of] = tensors[name_of][:-1]

    return change


def _empty(name):
    def change(tensors):
        name_of = f"model.layers.1.mlp.down_proj.{name}"
        tensors[name_of] = tensors[name_of].reshape(-1)[:0]

    return change


@pytest.mark.parametrize(
    ("format", "change", "problem"),
    [
        ("gptq", _without("scales"), "missing tensor model.layers.0.mlp.down_proj.scales"),
        ("gptq", _cut("qzeros"), "down_proj.qzeros has shape"),
        ("gptq", _cut("qweight"), "has [0-9] bits a number|has shape"),
        ("awq", _cut("qweight"), "95 inputs, which groups of 32 do not divide"),
        ("awq", _without("qzeros"), "missing tensor"),
        ("packed", _cut("weight_scale"), "fit none of the config_groups"),
        ("packed", _without("weight_shape"), "weight_shape"),
        ("packed", _without("weight_scale"), "missing tensor .*weight_scale"),
        ("int8", _without("weight"), "missing tensor .*down_proj.weight"),
        ("int8", _without("weight_scale"), "0.mlp.down_proj.weight is in I8, and .* no scales"),
        ("gptq", _empty("g_idx"), r"down_proj.g_idx has shape \(0,\)"),
        ("gptq", _empty("qweight"), r"down_proj.qweight has shape \(0,\)"),
        ("gptq", _empty("scales"), r"down_proj.scales has shape \(0,\)"),
        ("awq", _empty("qweight"), r"down_proj.qweight has shape \(0,\)"),
        ("packed", _empty("weight_packed"), r"down_proj.weight_packed has shape \(0,\)"),
        ("int8", _empty("weight"), r"down_proj.weight has shape \(0,\)"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, format, change, problem):
    """The error names the tensor, what it has, and what it should have."""
    folder, _, _ = _folders(tmp_path, format)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem):
        _load(folder)


@pytest.mark.parametrize("format", ["gptq", "awq", "packed"])
def test_groups_that_do_not_divide_are_refused(tmp_path, format):
    """All such weights are listed, with their inputs and the group."""
    config, write, drawn = FORMATS[format]
    folder, _, _ = write_folders(tmp_path, config, write, **drawn)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 40'))
    with pytest.raises(CheckpointError, match="groups of 40|config_groups") as caught:
        _load(folder)
    assert len(caught.value.problems) == 2 * 7


def test_uneven_orders_of_inputs_are_refused(tmp_path):
    """A g_idx whose groups are not of one size is an error of the checkpoint."""
    folder, _, _ = _folders(tmp_path, "gptq, act order")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.g_idx"][:] = 0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj.*g_idx does not have 32 inputs"):
        _load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "four bits stored as uint8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_storage": "bfloat16",
            },
            "bnb_4bit_quant_storage='bfloat16'",
        ),
        ({"quant_method": "hqq"}, "quant_method='hqq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e4m3' is read"),
        ({"quant_method": "fp8", "format": "float8_e5m2"}, "'e4m3' is read"),
        ({"quant_method": "fp8", "weight_scale_semantics": "log"}, "semantics='log'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"bits": 4}, "quant_method=None"),
        (GPTQ4 | {"bits": 3}, "bits=3"),
        (GPTQ4 | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ4 | {"is_marlin_format": True}, "'gptq' and 'gptq_v2' are read"),
        (AWQ4 | {"version": "gemv"}, "version='gemv'"),
        (AWQ4 | {"bits": 8}, "4 bits in the version 'gemm'"),
        (compressed("float-quantized", 4, 16, type="float"), "num_bits=4"),
        (compressed("nvfp4-pack-quantized", 4, 16, type="float"), "nvfp4"),
        (
            compressed("nvfp4-pack-quantized", 4, 32, type="float", strategy="tensor_group"),
            "'tensor_group' of 16",
        ),
        (compressed("pack-quantized", 4, 32, strategy="block"), "strategy='block'"),
        (compressed("marlin-24", 4, 32), "format='marlin-24'"),
        (compressed("pack-quantized", 4, 32) | {"config_groups": [{}]}, r"config_groups=\[{}\]"),
        (
            compressed("float-quantized", 8, -1, type="float", strategy="block", block_structure=3),
            "block_structure=3",
        ),
        (
            compressed("pack-quantized", 4, 32) | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config",
        ),
        (
            compressed("pack-quantized", 4, 32)
            | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            r"transform_config with \['u'\], rotations",
        ),
    ],
)
def test_other_formats_are_refused(tmp_path, config, message):
    """The error says what was given and which formats are read."""
    write_folder(tmp_path, {"model_type": "llama", "quantization_config": config}, {})
    with pytest.raises(UnsupportedModelError, match=message):
        _load(tmp_path)


def test_options_that_do_not_fit_a_quantised_folder(tmp_path):
    """A second rounding and stages are refused; "keep" is what happens anyway."""
    folder, whole, _ = _folders(tmp_path, "awq")
    with pytest.raises(InvalidConfigError, match="quantize='int8' rounds dense weights"):
        _load(folder, "int8")
    with pytest.raises(InvalidConfigError, match="cannot be cut into stages"):
        _load(folder, mesh=StagePlan.of([1, 1]))
    with pytest.raises(InvalidConfigError, match="a folder of dense weights"):
        _load(whole, "keep")
    assert _load(folder, "keep").graphdef == _load(folder).graphdef


@pytest.mark.parametrize("block", [(24, 40), (7, 13), (128, 128)])
@pytest.mark.parametrize("scale", [np.float32, ml_dtypes.float8_e8m0fnu, BF16])
def test_blocks_that_do_not_divide_and_scales_of_powers(tmp_path, block, scale):
    """The last block of a row or column is cut, as in transformers 5.24.0's dequantisation.

    Scales in float8_e8m0 are powers of two (`scale_fmt` "ue8m0" of DeepSeek-V3.1's folders).
    """
    rng = np.random.default_rng(1)
    codes = rng.integers(-8, 8, (50, 90)).astype(ml_dtypes.float8_e4m3fn)
    shape = (-(-50 // block[0]), -(-90 // block[1]))
    scales = np.exp2(rng.integers(-9, 3, shape)).astype(scale)
    module = "model.layers.0.mlp.up_proj"
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    tensors = {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}
    write_folder(tmp_path, {"quantization_config": config}, tensors)
    whole = np.repeat(np.repeat(scales.astype("f"), block[0], 0), block[1], 1)[:50, :90]
    found = _source(tmp_path).read(f"{module}.weight")
    np.testing.assert_array_equal(found, codes.astype("f") * whole)


@pytest.mark.parametrize("block", [None, [10, 45]])
def test_scales_that_are_inverses_divide(tmp_path, block):
    """GPTQModel 7.7.0 writes 1 / scale as weight_scale_inv, and says so in the configuration.

    Without the field, numbers are multiplied, as in DeepSeek-V3's folders and transformers 5.24.0.
    """
    rng = np.random.default_rng(2)
    codes = rng.integers(-8, 8, (50, 90)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 9, (5, 2) if block else (50,)).astype(np.float32)
    module = "model.layers.0.mlp.up_proj"
    tensors = {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}
    whole = np.repeat(np.repeat(scales, 10, 0), 45, 1) if block else scales[:, None]
    for semantics, factor in (("inverse", 1 / whole), (None, whole)):
        config = {
            "quant_method": "fp8",
            "format": "float8_e4m3fn",
            "weight_scale_method": "block" if block else "row",
            "weight_block_size": block,
            "weight_scale_semantics": semantics,
        }
        write_folder(tmp_path, {"quantization_config": config}, tensors)
        found = _source(tmp_path).read(f"{module}.weight")
        np.testing.assert_allclose(found, codes.astype("f") * factor, rtol=1e-6)


def test_float8_of_another_kind_is_refused(tmp_path):
    """The bits of float8_e5m2 are other numbers than those of float8_e4m3fn."""
    module = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{module}.weight": np.ones((8, 8), ml_dtypes.float8_e5m2),
        f"{module}.weight_scale": np.ones((), np.float32),
    }
    write_folder(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, tensors)
    with pytest.raises(CheckpointError, match="in F8_E5M2, not in F8_E4M3"):
        _source(tmp_path)


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_zero_points_of_symmetric_weights_are_the_middle(tmp_path, stored, version, is_symmetric):
    """They are so in both versions of GPTQ, whichever of them the configuration says.

    Version 1 stores 7 and version 2 stores 8 (GPTQModel 7.7.0); vLLM's Marlin kernels do not read
    them. Zero points of other weights are what the version says.
    """
    module = "model.layers.0.mlp.up_proj"
    word = int.from_bytes(bytes([stored * 17] * 4), "little", signed=True)
    codes = np.random.default_rng(3).integers(0, 2**31, (4, 16), np.int32)
    tensors = {
        f"{module}.qweight": codes,
        f"{module}.qzeros": np.full((1, 2), word, np.int32),
        f"{module}.scales": np.ones((1, 16), np.float16),
    }
    config = dict(bits=4, group_size=-1, sym=is_symmetric, checkpoint_format=version)
    write_folder(tmp_path, {"quantization_config": {"quant_method": "gptq", **config}}, tensors)
    octets = codes.T.copy().view(np.uint8)
    numbers = np.stack([octets & 15, octets >> 4], -1).reshape(16, 32).astype("f")
    zero = 8 if is_symmetric else stored + (version == "gptq")
    np.testing.assert_array_equal(_source(tmp_path).read(f"{module}.weight"), numbers - zero)


def test_modelopt_describes_its_weights_in_a_file_of_its_own(tmp_path):
    """Its first versions wrote hf_quant_config.json alone, with their own version in it."""
    folder, _, numbers = _folders(tmp_path, "modelopt")
    config = json.loads((folder / "config.json").read_text())
    own = {"producer": {"name": "modelopt"}, "quantization": config.pop("quantization_config")}
    del own["quantization"]["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    method = method_in(folder, config)
    assert method is not None
    source = QuantisedFolder(SafetensorsSource(folder), method)
    for name, wanted in numbers.items():
        np.testing.assert_array_equal(source.read(name), wanted)


@pytest.mark.parametrize("change", ["weight_format", "SCB", "weight"])
def test_damaged_folders_of_eight_bits_are_refused(tmp_path, change):
    """Rows in another order, scales of another length, and numbers of another type."""
    folder, _, _ = _folders(tmp_path, "bitsandbytes, 8 bits")
    name = f"model.layers.0.mlp.up_proj.{change}"
    tensors = load_file(folder / "model.safetensors")
    changed = {
        "weight_format": lambda x: np.ones_like(x),
        "SCB": lambda x: x[1:],
        "weight": lambda x: x.view(np.uint8),
    }
    tensors[name] = changed[change](tensors[name])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="layers.0.mlp.up_proj"):
        _source(folder)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_formats_in_files_of_their_own_are_read(tmp_path, name):
    """AutoGPTQ and AutoAWQ once wrote quantization_config beside config.json (vLLM reads them)."""
    format = "gptq" if name == "quantize_config.json" else "awq"
    folder, _, numbers = _folders(tmp_path, format)
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    del own["quant_method"]
    if format == "awq":
        own = {"w_bit": own["bits"], "q_group_size": own["group_size"], "version": "GEMM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(json.dumps(own))
    loaded = _load(folder, "keep")
    assert loaded.params is not None and numbers
