"""GGUF files written by the reference writer, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxserve.core.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.gguf import GGUFSource
from jaxserve.models.loading import abstract_model, load_params
from jaxserve.models.rope import Rope, RopeScaling, inverse_frequencies
from tests.models.gguf_models import (
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    write_gguf,
)

ROW_LENGTH = 512
PLAIN = {"F16": "float16", "BF16": "bfloat16"}


def _can_be_dequantised(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DEQUANTISED = [kind for kind in gguf.GGMLQuantizationType if _can_be_dequantised(kind)]


def _random_rows(kind: gguf.GGMLQuantizationType, num_rows: int, seed: int) -> np.ndarray:
    """Return uint8 [num_rows, bytes of ROW_LENGTH values], random blocks with finite values."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = num_rows * ROW_LENGTH // block
    shape = (2 * num_blocks, block_bytes)
    drawn = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.dequantize(drawn, kind)).all(-1)
    return drawn[finite][:num_blocks].reshape(num_rows, -1)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_in_hugging_face_names_and_order(path, arch):
    """Every tensor equals its twin; only the llama architecture has permuted rows."""
    twin = write_gguf(path, arch)
    source = GGUFSource(path)
    assert source.shapes() == {name: tensor.shape for name, tensor in twin.items()}
    for name, tensor in twin.items():
        np.testing.assert_array_equal(source.read(name), tensor, err_msg=name)


@pytest.mark.parametrize("quantisation", [None, gguf.GGMLQuantizationType.Q8_0])
def test_a_part_equals_the_part_of_the_whole(path, quantisation):
    """Reading a slice gives what slicing the whole tensor gives, permuted rows included."""
    write_gguf(path, quantisation=quantisation)
    source = GGUFSource(path)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        whole = source.read(name)
        for index in ((slice(5, 41),), (slice(None), slice(3, 40)), (slice(32, 64), slice(0, 32))):
            np.testing.assert_array_equal(source.read(name, index), whole[index])
    norm = source.read("model.norm.weight")
    np.testing.assert_array_equal(source.read("model.norm.weight", (slice(2, 9),)), norm[2:9])


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantises(path, kind):
    """Random blocks of each type equal `gguf`'s dequantised values, whole and in part."""
    rows = _random_rows(kind, num_rows=24, seed=int(kind))
    stored = {"blk.0.ffn_up.weight": rows}
    write_gguf(path, leave_out="blk.0.ffn_up.weight", extra=stored, extra_type=kind)
    source, name = GGUFSource(path), "model.layers.0.mlp.up_proj.weight"
    whole = gguf.dequantize(rows, kind)
    assert source.shapes()[name] == whole.shape == (24, ROW_LENGTH)
    assert source.read(name).dtype == PLAIN.get(kind.name, "float32")
    for index in (
        (),
        (slice(5, 6),),
        (slice(7, 24), slice(3, 300)),
        (slice(None), slice(256, 512)),
    ):
        np.testing.assert_array_equal(source.read(name, index).astype(np.float32), whole[index])


def test_a_type_that_gguf_cannot_dequantise_is_refused(path):
    """The message names tensor and type, and the types that can be read."""
    stored = {"blk.0.ffn_up.weight": np.zeros((4, 292), np.uint8)}
    kind = gguf.GGMLQuantizationType.Q8_K
    write_gguf(path, leave_out="blk.0.ffn_up.weight", extra=stored, extra_type=kind)
    with pytest.raises(UnsupportedModelError, match="ffn_up.weight.*Q8_K.*such as Q8_0"):
        GGUFSource(path).read("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_configuration_is_recovered(path, arch):
    """Sizes, rotary base, tied embeddings, biases and norms are in `LlamaConfig`; it loads."""
    write_gguf(path, arch, tied=True)
    source = GGUFSource(path)
    config = LlamaConfig.from_hf(source.config)
    assert config == LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        norm_eps=config.norm_eps,
        rope=Rope(theta=5000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )
    assert abs(config.norm_eps - 1e-5) < 1e-10
    _, abstract = abstract_model(config)
    load_params(abstract, config, source)


def test_llama3_frequencies_are_recovered_from_their_table(path):
    """rope_freqs.weight becomes the parameters of Llama 3's scaling; another table is refused."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    plain = inverse_frequencies(HEAD_DIM, 5000.0, None)
    table = (plain / inverse_frequencies(HEAD_DIM, 5000.0, scaling)).astype(np.float32)
    write_gguf(path, extra={"rope_freqs.weight": table})
    assert LlamaConfig.from_hf(GGUFSource(path).config).rope.scaling == scaling
    write_gguf(
        path, extra={"rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)}
    )
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        GGUFSource(path)


def test_rotary_scaling_and_sliding_window_are_recovered(path):
    """The metadata has linear scaling; a window makes a llama a mistral."""
    write_gguf(path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    scaling = LlamaConfig.from_hf(GGUFSource(path).config).rope.scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)
    write_gguf(path, attention__sliding_window=16)
    assert LlamaConfig.from_hf(GGUFSource(path).config).sliding_windows == (16, 16)


def _rotation_of_llama_cpp(fields, context):
    """Return frequencies and magnitude as llama.cpp has them for the architectures read here.

    Written after `llama_context` and `ggml_rope_yarn` of llama.cpp as xllamacpp 2026.10.11549 has
    them; keys of yarn that only other architectures have do nothing.
    """
    kind = fields.get("type", "linear")
    factor = 1.0 if kind == "none" else fields.get("factor") or 1.0
    pair = np.arange(HEAD_DIM // 2)
    extrapolated = 5000.0 ** (-2 * pair / HEAD_DIM)
    magnitude = fields.get("attn_factor", 1.0)
    if kind != "yarn":
        return extrapolated / factor, magnitude
    original = fields.get("original_context_length") or context

    def dimension(beta):
        return HEAD_DIM * np.log(original / (beta * 2 * np.pi)) / (2 * np.log(5000.0))

    low = max(0, np.floor(dimension(32)))
    high = min(HEAD_DIM - 1, np.ceil(dimension(1)))
    kept = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    mixed = extrapolated / factor * (1 - kept) + extrapolated * kept
    return mixed, magnitude * (1 + 0.1 * np.log(factor) if factor > 1 else 1)


YARN = {"type": "yarn", "factor": 8.0, "original_context_length": 32}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": "none", "factor": 4.0},
        {"factor": 4.0},
        {"type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 0.0},
        {"attn_factor": 1.25},
        {"type": "none", "attn_factor": 0.5},
        {"factor": 2.0, "attn_factor": 1.25},
        YARN,
        YARN | {"attn_factor": 1.0},
        YARN | {"attn_factor": 1.2},
        {"type": "yarn", "factor": 8.0},
        {"type": "yarn", "factor": 1.0},
        YARN | {"yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5},
        YARN | {"yarn_attn_factor": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_rotations_are_those_of_llama_cpp(path, fields, arch):
    """attn_factor is on top of yarn's own, and a factor without a type is linear."""
    write_gguf(path, arch, **{f"rope__scaling__{key}": value for key, value in fields.items()})
    source = GGUFSource(path)
    rope = LlamaConfig.from_hf(source.config).rope
    wanted, magnitude = _rotation_of_llama_cpp(fields, source.config["max_position_embeddings"])
    found = inverse_frequencies(HEAD_DIM, rope.theta, rope.scaling)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    own = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    np.testing.assert_allclose(own, magnitude, rtol=1e-6)


def test_a_folder_honours_what_its_gguf_file_ignores(path):
    """yarn's betas and attention_factor count in a folder, as in transformers 5.24.0.

    llama.cpp does not read the keys that its converter writes for them, for llama and qwen2.
    """
    scaling = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
    more = dict(beta_fast=4.0, beta_slow=0.5, attention_factor=1.0)
    given = {"model_type": "llama", "rope_parameters": {**scaling, **more}}
    rope = LlamaConfig.from_hf(given).rope
    config = transformers.LlamaConfig(rope_parameters=dict(given["rope_parameters"]))
    wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found = inverse_frequencies(128, rope.theta, rope.scaling)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
    assert rope.scaling.attention_factor == magnitude == 1.0
    keys = {"yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5, "yarn_attn_factor": 1.0}
    write_gguf(path, **{f"rope__scaling__{k}": v for k, v in (YARN | keys).items()})
    other = LlamaConfig.from_hf(GGUFSource(path).config).rope.scaling
    assert (other.beta_fast, other.beta_slow) == (32.0, 1.0)
    assert abs(other.attention_factor - 1.2079442) < 1e-6


def test_two_scalings_at_once_are_refused(path):
    """llama.cpp multiplies them; no converter writes both."""
    table = np.ones(HEAD_DIM // 2, np.float32)
    write_gguf(path, extra={"rope_freqs.weight": table}, rope__scaling__factor=4.0)
    with pytest.raises(UnsupportedModelError, match="one of both"):
        GGUFSource(path)


def test_what_no_family_implements_is_refused(path):
    """Other architectures, experts, partial rotation and unknown tensors are named."""
    write_gguf(path, "wavtokenizer-dec")
    with pytest.raises(UnsupportedModelError, match="'wavtokenizer-dec'.*llama"):
        GGUFSource(path)
    write_gguf(path, "qwen3", expert_count=8)
    with pytest.raises(UnsupportedModelError, match="8 experts"):
        GGUFSource(path)
    write_gguf(path, rope__dimension_count=16)
    with pytest.raises(UnsupportedModelError, match="16 of 32"):
        GGUFSource(path)
    write_gguf(path, extra={"blk.0.ffn_sub_norm.weight": np.ones(4, np.float32)})
    with pytest.raises(UnsupportedModelError, match="ffn_sub_norm"):
        GGUFSource(path)


def test_missing_tensors_are_reported(path):
    """The loader names a tensor that the configuration requires and the file lacks."""
    write_gguf(path, leave_out="blk.1.ffn_up.weight")
    source = GGUFSource(path)
    config = LlamaConfig.from_hf(source.config)
    _, abstract = abstract_model(config)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_params(abstract, config, source)
    with pytest.raises(CheckpointError, match="missing"):
        source.read("model.layers.1.mlp.up_proj.weight")
    write_gguf(path, leave_out="token_embd.weight")
    with pytest.raises(CheckpointError, match="token_embd"):
        GGUFSource(path)


def test_missing_and_absurd_metadata_are_reported(path):
    """Layer counts beyond the file's tensors, and zero heads, are refused before use."""
    for change, told in (
        ({"block_count": 2**31 - 1}, "2147483647 layers"),
        ({"attention__head_count": 0}, "head_count is 0"),
        ({"embedding_length": "many"}, "'many'"),
    ):
        write_gguf(path, **change)
        with pytest.raises(CheckpointError, match=told):
            GGUFSource(path)


def test_not_a_gguf_file(path):
    """Wrong magic, an empty file, a folder and an old version each give one typed error."""
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUFSource(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="too short"):
        GGUFSource(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        GGUFSource(path)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        GGUFSource(path.parent)


def test_every_truncation_is_reported(path):
    """Opening a file that is cut anywhere raises a CheckpointError with a remedy."""
    write_gguf(path)
    data = path.read_bytes()
    for size in [*range(0, 4000, 37), *range(4000, len(data), 9973), len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="download or copy it again"):
            GGUFSource(path)


def test_corruption_never_hangs_or_escapes(path):
    """Random bytes in the header give a typed error, or a file that still opens."""
    write_gguf(path)
    data = path.read_bytes()
    rng = np.random.default_rng(11)
    for trial in range(300):
        damaged = bytearray(data)
        for place in rng.integers(4, 3000, rng.integers(1, 4)):
            damaged[place : place + 8] = rng.integers(
                0, 256, rng.integers(1, 9), np.uint8
            ).tobytes()
        path.write_bytes(damaged)
        try:
            GGUFSource(path)
        except (CheckpointError, UnsupportedModelError):
            continue
        except Exception as error:
            raise AssertionError(f"seed 11, trial {trial}") from error


def test_a_huge_array_claim_is_refused_at_once(path):
    """An array with more items than the file has bytes is refused without a loop."""
    key = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    for item in (4, 8, 9):
        path.write_bytes(head + struct.pack("<IIQ", 9, item, 2**60) + bytes(64))
        with pytest.raises(CheckpointError):
            GGUFSource(path)
