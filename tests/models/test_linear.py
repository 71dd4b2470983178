"""Products with weights: each representation alone, and in whole models."""

from __future__ import annotations

import ast
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

import jaxserve
from jaxserve import Runtime, SamplingParams
from jaxserve.models.adapters import AdaptedWeight
from jaxserve.models.families import config_from_hf, family_of
from jaxserve.models.linear import Linear, WeightAxes, replace_weights
from jaxserve.models.quantised import INT4, INT8, QuantisedWeight, WeightFormat
from jaxserve.sharding import make_mesh, state_shardings
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.models.hf_checkpoints import VARIANTS, VOCAB_SIZE
from tests.models.serving import Server

NUM_ADAPTERS, RANK = 3, 4
PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 24)
# Variants with biases, tied embeddings, learned positions, projections at both ends, experts.
FAMILIES = ("llama", "smollm2", "gpt2", "opt_350m", "qwen3_moe")
# (shape, axes) of the layers' weights.
SHAPES = {
    "plain": ((24, 40), WeightAxes()),
    "fused": ((24, 2, 5, 4), WeightAxes()),
    "output": ((2, 3, 4, 24), WeightAxes(num_in=3)),
    "embedding": ((50, 24), WeightAxes(transposed=True)),
}


def _param(shape, seed: int = 0) -> nnx.Param:
    value = jax.random.normal(jax.random.key(seed), shape)
    return nnx.Param(value, logical_axes=(None,) * len(shape))


def _dequantised(dense: nnx.Param, axes: WeightAxes, format: WeightFormat = INT8) -> nnx.Param:
    """Return the dense weight that a quantised one represents."""
    flat = np.asarray(QuantisedWeight.of(dense, axes, format).dequantised())
    stacked, summed, out = axes.split(range(dense[...].ndim))
    order = (*stacked, *out, *summed)
    turned = flat.reshape([dense.shape[axis] for axis in order])
    return dense.replace(jnp.asarray(turned.transpose(np.argsort(order))))


def _adapted(dense: nnx.Param, axes: WeightAxes, rng: np.random.Generator) -> AdaptedWeight:
    """Return a dense weight with random adapters, which change it by about a third."""
    weight = AdaptedWeight.empty(dense, axes, num_adapters=NUM_ADAPTERS, rank=RANK)
    for part in (weight.a, weight.b, weight.scale):
        part[...] = jnp.asarray(rng.standard_normal(part.shape), jnp.float32) * 0.4
    return weight


def _merged(weight: AdaptedWeight, axes: WeightAxes, adapter: int) -> nnx.Param:
    """Return the dense weight of a token with this adapter; -1 for no adapter."""
    dense = np.asarray(weight.base[...], np.float64)
    if adapter < 0:
        return weight.base
    stacked, summed, out = axes.split(dense.shape)
    first = (slice(None),) * len(stacked)
    a = np.asarray(weight.a[...], np.float64)[(*first, adapter)].reshape(*stacked, -1, RANK)
    b = np.asarray(weight.b[...], np.float64)[(*first, adapter)].reshape(*stacked, RANK, -1)
    scale = np.asarray(weight.scale[...], np.float64)[(*first, adapter)]
    change = scale[..., None, None] * (a @ b)  # [*stacked, in, out]
    if axes.transposed:
        change = np.swapaxes(change, -1, -2)
    assert len(summed) + len(out) + len(stacked) == dense.ndim
    return weight.base.replace(jnp.asarray(dense + change.reshape(dense.shape), jnp.float32))


# ---- one weight ----


def _input(shape, axes: WeightAxes, num_tokens: int) -> jax.Array:
    _, summed, _ = axes.split(shape)
    return jax.random.normal(jax.random.key(9), (num_tokens, *summed))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dense_product_sums_over_the_in_axes(shape):
    """[tokens, *in] times [*in, *out] is [tokens, *out], and the bias is added."""
    (shape, axes) = SHAPES[shape]
    dense = _param(shape)
    x = _input(shape, axes, 7)
    wanted = np.tensordot(
        np.asarray(x),
        np.asarray(dense[...]).T if axes.transposed else np.asarray(dense[...]),
        axes.num_in,
    )
    bias = _param(wanted.shape[1:], seed=3)
    got = jax.jit(Linear(dense, bias, transposed=axes.transposed))(x, None)
    assert_close(got, wanted + np.asarray(bias[...]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_in_eight_bits_is_off_by_half_a_scale_at_most(shape):
    """Each output channel has its own scale, and its largest number is stored exactly."""
    (shape, axes) = SHAPES[shape]
    dense = _param(shape)
    summed = axes.split(range(len(shape)))[1]
    restored = np.asarray(_dequantised(dense, axes)[...])
    largest = np.abs(np.asarray(dense[...])).max(summed, keepdims=True)
    error = np.abs(restored - np.asarray(dense[...]))
    assert (error <= largest / 127 * 0.5001).all() and error.max() > 0
    np.testing.assert_allclose(np.abs(restored).max(summed, keepdims=True), largest, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_in_four_bits_is_off_by_about_half_a_step_at_most(shape):
    """Each group of 32 numbers of an output channel has 16 levels from its smallest number on."""
    (shape, axes) = SHAPES[shape]
    dense = _param(shape)
    stacked, summed, out = axes.split(range(len(shape)))
    order = (*stacked, *out, *summed)

    def channels(array):
        turned = np.asarray(array).transpose(order)
        return turned.reshape(*turned.shape[: len(stacked) + len(out)], -1)

    error = channels(_dequantised(dense, axes, INT4)[...]) - channels(dense[...])
    before = channels(dense[...])
    for first in range(0, before.shape[-1], 32):
        group = before[..., first : first + 32]
        low, high = np.minimum(group.min(-1), 0), np.maximum(group.max(-1), 0)
        # The minimum is a float16 number of its channel's largest scale.
        limit = (high - low) / 15 * 0.51 + np.abs(before).max() * 2**-10
        assert (np.abs(error[..., first : first + 32]) <= limit[..., None]).all()
    assert np.abs(error).max() > 0


@pytest.mark.parametrize(("format", "bits"), [(INT8, 8.06), (INT4, 5.06)], ids=["int8", "int4"])
def test_memory_is_what_the_format_says(format, bits):
    """Codes, scales and minima of a matrix take the stated bits a number."""
    dense = _param((576, 960))
    stored = nnx.state(QuantisedWeight.of(dense, WeightAxes(), format))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    assert num_bytes * 8 / dense[...].size == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"]))
def test_a_quantised_product_is_that_of_the_dequantised_weight(shape, format, dtype):
    """The result has the activations' dtype, rounded equally, or the requested dtype."""
    (shape, axes) = SHAPES[shape]
    dense, x = _param(shape), _input(shape, axes, 7).astype(dtype)
    quantised = Linear(QuantisedWeight.of(dense, axes, format), transposed=axes.transposed)
    restored = Linear(_dequantised(dense, axes, format), transposed=axes.transposed)
    wanted = jax.jit(restored)(x.astype(jnp.float32), None)
    got = jax.jit(quantised)(x, None)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 6e-3
    assert_close(np.asarray(got, np.float32), wanted, tolerance)
    wide = jax.jit(partial(quantised, out_dtype=jnp.float32))(x, None)
    assert_close(wide, wanted, tolerance)


@pytest.mark.release
@pytest.mark.parametrize("transposed", some([False, True]))
def test_a_large_quantised_weight_is_never_widened_as_a_whole(transposed):
    """For a weight of 41 MB in float32, a product needs less than 20 MB at a time."""
    shape = (20_001, 512) if transposed else (512, 20_001)
    axes = WeightAxes(transposed=transposed)
    dense, x = _param(shape), _input(shape, axes, 3)
    linear = Linear(QuantisedWeight.of(dense, axes), transposed=transposed)
    product = jax.jit(lambda linear, x: linear(x, None)).lower(linear, x).compile()
    assert product.memory_analysis().temp_size_in_bytes < 20e6
    assert_close(product(linear, x), Linear(_dequantised(dense, axes), None, transposed)(x, None))


@pytest.mark.parametrize("base", some(["dense", "quantised"], 1))
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_go_through_their_own_adapters(shape, base):
    """Each token's product is that with its adapter's merged weight; -1 is the base weight."""
    (shape, axes) = SHAPES[shape]
    dense = _param(shape)
    adapter = np.array([2, -1, 0, 1, 1, -1, 2], np.int32)
    x = _input(shape, axes, len(adapter))
    weight = _adapted(dense, axes, np.random.default_rng(1))
    merged = AdaptedWeight(dense, weight.a, weight.b, weight.scale)
    if base == "quantised":
        weight.base = QuantisedWeight.of(dense, axes)
        merged.base = _dequantised(dense, axes)
    got = jax.jit(Linear(weight, transposed=axes.transposed))(x, jnp.asarray(adapter))
    for token, number in enumerate(adapter):
        own = Linear(_merged(merged, axes, number), transposed=axes.transposed)
        assert_close(got[token], own(x[token : token + 1], None)[0])
    without = Linear(weight, transposed=axes.transposed)(x, None)
    assert_close(without, Linear(merged.base, transposed=axes.transposed)(x, None))


def test_an_adapter_that_is_not_a_number_reaches_its_own_tokens_only():
    """The products of other tokens are unchanged, bit for bit."""
    shape, axes = SHAPES["fused"]
    weight = _adapted(_param(shape), axes, np.random.default_rng(1))
    x, adapter = _input(shape, axes, 4), jnp.asarray([0, 1, -1, 2])
    wanted = np.asarray(Linear(weight)(x, adapter))
    weight.a[...] = weight.a[...].at[1].set(jnp.nan)
    got = np.asarray(Linear(weight)(x, adapter))
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2, 3]], wanted[[0, 2, 3]])


@pytest.mark.release
@pytest.mark.parametrize("kind", ["dense", "quantised", "adapted"])
def test_groups_of_tokens_have_matrices_of_their_own(kind):
    """Products by expert are those of each expert alone; tokens without a group get zeros."""
    experts, sizes = 4, np.array([3, 0, 5, 2])
    shape, axes = (experts, 24, 2, 6), WeightAxes(num_stacked=1)
    dense = _param(shape)
    x = jax.random.normal(jax.random.key(9), (sizes.sum() + 2, 24))
    adapter = np.random.default_rng(0).integers(-1, NUM_ADAPTERS, len(x)).astype(np.int32)
    adapted = _adapted(dense, axes, np.random.default_rng(1))
    weights = {"dense": dense, "quantised": QuantisedWeight.of(dense, axes), "adapted": adapted}
    got = jax.jit(lambda linear, *args: linear.grouped(*args))(
        Linear(weights[kind]), x, jnp.asarray(sizes), jnp.asarray(adapter)
    )
    expert = np.repeat(np.arange(experts), sizes)
    for token, number in enumerate(expert):
        restored = {
            "dense": dense,
            "quantised": _dequantised(dense, axes),
            "adapted": _merged(adapted, axes, adapter[token]),
        }[kind]
        wanted = np.tensordot(np.asarray(x[token]), np.asarray(restored[...])[number], 1)
        assert_close(got[token], wanted)
    assert not np.asarray(got[len(expert) :]).any()


@pytest.mark.parametrize("way", some(["product", "grouped_product", "rows"]))
def test_outputs_go_through_the_adapter_of_their_own_module(way):
    """As with a rank for all modules together, and zeros where an output is another one's."""
    spans = ((0, 20), (2, 6), (1, 10), (0, 4))
    shape, axes = {
        "product": ((24, 2, 5, 4), WeightAxes()),
        "grouped_product": ((2, 24, 40), WeightAxes(num_stacked=1)),
        "rows": ((40, 24), WeightAxes(transposed=True)),
    }[way]
    dense, rng = _param(shape), np.random.default_rng(1)
    weight = AdaptedWeight.empty(dense, axes, num_adapters=NUM_ADAPTERS, rank=RANK, spans=spans)
    wide = AdaptedWeight.empty(dense, axes, num_adapters=NUM_ADAPTERS, rank=3 * RANK)
    for part in (weight.a, weight.b, weight.scale):
        part[...] = jnp.asarray(rng.standard_normal(part.shape), jnp.float32) * 0.4
    wide.a[...], wide.scale[...] = weight.a[...], weight.scale[...]
    before = weight.b.shape[: axes.num_stacked + 1]
    narrow, padded = np.asarray(weight.b[...]).reshape(*before, RANK, 40), np.zeros(wide.b.shape)
    flat, end = padded.reshape(*before, 3 * RANK, 40), 0
    for module, size in spans:
        begin, end = end, end + size
        flat[..., module * RANK : (module + 1) * RANK, begin:end] = narrow[..., begin:end]
    wide.b[...] = jnp.asarray(padded, jnp.float32)
    adapter = jnp.asarray([1, -1, 0, 2], jnp.int32)
    x = jax.random.normal(jax.random.key(2), (4, 24))
    got, wanted = (
        Linear(each).rows(jnp.asarray([3, 20, 39, 25]), adapter, "float32")
        if way == "rows"
        else Linear(each).grouped(x, jnp.asarray([1, 3]), adapter)
        if way == "grouped_product"
        else Linear(each)(x, adapter)
        for each in (weight, wide)
    )
    assert_close(got, wanted)


def test_rows_of_an_embedding_are_those_of_the_weight():
    """Quantised rows are restored; adapted rows have the same change as their logits."""
    shape, axes = SHAPES["embedding"]
    dense, index = _param(shape), jnp.asarray([3, 3, 49, 0])
    adapter = jnp.asarray([1, -1, 0, 2])
    adapted = _adapted(dense, axes, np.random.default_rng(1))
    np.testing.assert_array_equal(Linear(dense).rows(index, None, "float32"), dense[...][index])
    restored = np.asarray(_dequantised(dense, axes)[...])[index]
    quantised = Linear(QuantisedWeight.of(dense, axes))
    np.testing.assert_allclose(quantised.rows(index, None, "float32"), restored, rtol=1e-6)
    assert quantised.rows(index, None, "bfloat16").dtype == jnp.bfloat16
    got = Linear(adapted).rows(index, adapter, "float32")
    for token, number in enumerate(adapter):
        whole = np.asarray(_merged(adapted, axes, int(number))[...])
        assert_close(got[token], whole[index[token]])


# ---- whole models ----


@cache
def _parts(variant: str, layer_layout: str):
    kind, fields, _ = VARIANTS[variant]
    config = config_from_hf(getattr(transformers, kind)(**fields).to_dict())
    decoder = family_of(config).decoder
    return nnx.split(decoder(config, rngs=nnx.Rngs(params=0), layer_layout=layer_layout))


def _model(variant: str, layer_layout: str = "unrolled"):
    """Return a random model of its own, which is the same in each call."""
    return nnx.merge(*_parts(variant, layer_layout))


def _logits(model, mesh=None, adapters=None) -> list[np.ndarray]:
    """Return logits of three sequences, by sequence, in a mixed batch and then a decode batch."""
    graphdef, params = nnx.split(model)
    if mesh is not None:
        params = jax.device_put(params, state_shardings(params, mesh))
    server = Server(graphdef, params, model.config, model.layer_layout, adapters=adapters)
    mixed = server.step([(0, PROMPT[:9]), (1, PROMPT[:1]), (2, PROMPT[4:20])])
    decoded = server.decode({0: PROMPT[9], 1: PROMPT[1], 2: PROMPT[20]})
    return [np.concatenate(pair) for pair in zip(mixed, decoded, strict=True)]


def _adapt(model, change=lambda weight, axes: weight) -> None:
    """Give every weight of a model the same random adapters in each call; then `change` them."""
    rng = np.random.default_rng(5)
    replace_weights(model, lambda dense, axes: change(_adapted(dense, axes, rng), axes))


# (variant, layer layout, shards).
CASES = (
    ("llama", "unrolled", 1),
    ("opt_350m", "unrolled", 1),
    ("qwen3_moe", "scanned", 1),
    ("smollm2", "unrolled", 2),
    ("qwen3_moe", "unrolled", 2),
    ("olmo2", "unrolled", 2),
    ("granite", "scanned", 1),
    ("gemma4", "unrolled", 2),
    ("qwen2_moe", "unrolled", 2),
)


def _mesh(num_shards: int):
    return None if num_shards == 1 else make_mesh(tensor=num_shards)


@pytest.mark.parametrize(("variant", "layer_layout", "num_shards"), some(CASES))
def test_a_quantised_model_is_the_dequantised_one(variant, layer_layout, num_shards):
    """If every product's weight has 8 bits, logits are those of the restored weights."""
    quantised, restored = (_model(variant, layer_layout) for _ in range(2))
    replace_weights(quantised, QuantisedWeight.of)
    replace_weights(restored, _dequantised)
    wanted = np.concatenate(_logits(restored))
    assert_close(np.concatenate(_logits(quantised, _mesh(num_shards))), wanted)


@pytest.mark.parametrize("variant", some(FAMILIES, 0, len(FAMILIES) - 1))
def test_all_matrices_are_weights_of_products(variant):
    """After quantising, only norms, biases, scales and learned positions are floats."""
    model = _model(variant)
    replace_weights(model, QuantisedWeight.of)
    floating = {
        ".".join(str(part) for part in path if not isinstance(part, int))
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if leaf.get_value().dtype != jnp.uint8
    }
    others = {name for name in floating if name.rpartition(".")[2] not in ("scale", "channels")}
    names = {name.rpartition(".")[2] for name in others}
    assert names <= {"bias", "bqkv", "bo", "bgate_up", "bup", "bdown", "positions"}


@pytest.mark.release
@pytest.mark.parametrize(("variant", "layer_layout", "num_shards"), some(CASES))
def test_sequences_have_the_adapters_of_their_rows(variant, layer_layout, num_shards):
    """Each sequence of a batch has the logits of a model with its adapter's merged weights."""
    adapters = (1, -1, 2)
    model = _model(variant, layer_layout)
    _adapt(model)
    got = _logits(model, _mesh(num_shards), adapters)
    alike = []
    for sequence, adapter in enumerate(adapters):
        merged = _model(variant, layer_layout)
        _adapt(merged, partial(_merged, adapter=adapter))
        wanted = _logits(merged)
        assert_close(got[sequence], wanted[sequence])
        alike += [
            np.abs(got[other] - wanted[other]).max() for other in range(3) if other != sequence
        ]
    assert min(alike) > 1e-2


@pytest.mark.release
def test_quantising_after_adapting_leaves_the_adapters():
    """The base weight is replaced, and rows still have their adapters."""
    model = _model("llama")
    _adapt(model)
    exact = _logits(model, adapters=(1, -1, 2))
    replace_weights(model, QuantisedWeight.of)
    first = model.blocks[0].attention.wqkv
    assert isinstance(first, AdaptedWeight) and isinstance(first.base, QuantisedWeight)
    got = _logits(model, adapters=(1, -1, 2))
    for own, wanted in zip(got, exact, strict=True):
        assert_close(own, wanted, 0.1)


@pytest.mark.release
def test_a_runtime_serves_a_quantised_model():
    """Greedy answers are those of the restored weights."""
    prompts, each = random_prompts(5, longest=30), SamplingParams(max_tokens=12)
    models = [tiny_llama(), tiny_llama()]
    replace_weights(models[0], QuantisedWeight.of)
    replace_weights(models[1], _dequantised)
    answers = []
    for model in models:
        with Runtime(model, **OPTIONS) as rt:
            answers.append([c.token_ids for c in rt.generate(prompts, each)])
    assert answers[0] == answers[1]


def test_only_a_linear_multiplies_with_a_weight():
    """No other module of the models calls a product kernel or multiplies by a parameter."""
    folder = Path(jaxserve.__file__).parent / "models"
    # Rotary tables use a product with ones and zeros; attention of encoders multiplies values by
    # weights, and recurrences multiply inputs by states. To merge an adapter, its matrices are
    # multiplied.
    allowed = {"linear.py", "quantised.py", "adapters.py", "rope.py", "mamba.py", "mamba1.py"}
    allowed |= {"adapter_layout.py", "delta_rule.py", "encoder_decoder.py"}
    products = {"matmul", "dot", "dot_general", "ragged_dot", "einsum", "tensordot"}
    found = [
        f"{module.name}:{node.lineno}"
        for module in folder.rglob("*.py")
        if module.name not in allowed
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in products
        or isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.MatMult)
    ]
    assert not found, found
