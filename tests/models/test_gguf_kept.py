"""Blocks of GGUF files as they are, against the dequantisation of the `gguf` package."""

from __future__ import annotations

import logging

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.kernels import dequantise
from jaxserve.kernels.quantised_matmul import pack
from jaxserve.models.gguf import BLOCK_TYPES, CommonForm
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.store import load_model
from jaxserve.sharding import make_mesh
from tests.common.tiers import some
from tests.models.gguf_models import TOKENIZER, write_gguf
from tests.models.kept_weights import dense, restored

# Where each type's blocks have float16 numbers.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def _random_rows(name: str, num_rows: int = 5, length: int = 768) -> np.ndarray:
    """Return rows of random blocks, with scales that are finite."""
    rng = np.random.default_rng(len(name) + num_rows)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rows = rng.integers(0, 256, (num_rows, length // block, size)).astype(np.uint8)
    for at in HALVES[name]:
        scales = rng.standard_normal(rows.shape[:2]).astype(np.float16)
        rows[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":  # the first byte is an exponent
        rows[..., 0] = rng.integers(120, 134, rows.shape[:2])
    rows[0, 0] = 0  # a block of zeros
    return rows.reshape(num_rows, -1)


def _packed(form: CommonForm, kind: str, rows: np.ndarray) -> np.ndarray:
    """Return the numbers of rows after they were packed in a form."""
    parts = {
        name: form.part(name, BLOCK_TYPES[kind], rows) for name in ("codes", "scales", "minima")
    }
    dtype = np.float16 if form.has_halves else np.float32
    packed = pack(
        jnp.asarray(parts["codes"]),
        jnp.ones(len(rows)),
        jnp.asarray(parts["scales"][:, :: form.group].astype(dtype)),
        jnp.asarray(parts["minima"][:, :: form.group].astype(dtype)) if form.has_minima else None,
        bits=form.bits,
        group=form.group,
    )
    return np.asarray(dequantise(packed))[: len(rows)]


@pytest.mark.parametrize(
    "others",
    some([(), *((name,) for name in BLOCK_TYPES), tuple(BLOCK_TYPES)], 0, 7, are_tuples=True),
)
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packed_blocks_have_the_numbers_of_the_file(name, others):
    """They are `gguf.dequantize`'s, also in a form that holds other types beside them."""
    rows = _random_rows(name)
    form = CommonForm.of([BLOCK_TYPES[each] for each in (name, *others)])
    wanted = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(_packed(form, name, rows), wanted, rtol=1e-6, atol=1e-6)


def test_minima_of_large_scales_are_finite():
    """-8 scales are over float16's range, where such blocks are fused with those with minima."""
    rows = _random_rows("Q4_0", 1, 32)
    rows[..., :2] = np.array([60000], np.float16).view(np.uint8)
    form = CommonForm.of([BLOCK_TYPES["Q4_0"], BLOCK_TYPES["Q4_1"]])
    wanted = gguf.dequantize(rows, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_allclose(_packed(form, "Q4_0", rows), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_scales_are_read_once_for_as_many_numbers_as_asked(name):
    """`unit` numbers have one; with one for each number they are the same."""
    rows, kind = _random_rows(name), BLOCK_TYPES[name]
    form = CommonForm.of([kind])
    for part in ("scales", "minima"):
        each = form.part(part, kind, rows)
        few = form.part(part, kind, rows, kind.group)
        assert each.shape[-1] == few.shape[-1] * kind.group
        np.testing.assert_array_equal(each, np.repeat(few, kind.group, axis=-1))


def _load(path, quantize="keep", **options):
    quantisation = Quantisation.of(RuntimeOptions(quantize=quantize)) if quantize else None
    return load_model(path, quantisation=quantisation, progress=False, **options)


@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
@pytest.mark.parametrize("name", some(["Q8_0", "Q4_0", "Q4_1"], 1))
def test_a_file_is_loaded_without_rounding(tmp_path, monkeypatch, name, layout):
    """All matrices are quantised weights with the numbers of the dequantised file."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation=gguf.GGMLQuantizationType[name], tokenizer=TOKENIZER)
    kept, whole = (_load(path, each, layer_layout=layout) for each in ("keep", None))
    found, wanted = restored(kept), dense(whole)
    assert found.keys() == wanted.keys() and len(found) >= 4
    for path, numbers in found.items():
        np.testing.assert_array_equal(numbers, wanted[path])


@pytest.mark.release
def test_kept_blocks_on_a_mesh(tmp_path, monkeypatch):
    """A mesh places the panels, and the numbers are the same."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation=gguf.GGMLQuantizationType.Q4_1, tokenizer=TOKENIZER)
    alone, shared = _load(path), _load(path, mesh=make_mesh(tensor=2))
    assert any(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(shared.params))
    wanted = restored(alone)
    for path, numbers in restored(shared).items():
        np.testing.assert_array_equal(numbers, wanted[path])


def test_other_tensors_are_dequantised_and_logged(tmp_path, monkeypatch, caplog):
    """A type without a form here becomes dense; one line says so."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation=gguf.GGMLQuantizationType.Q5_0, tokenizer=TOKENIZER)
    with caplog.at_level(logging.WARNING):
        loaded = _load(path)
    assert not restored(loaded) and "Q5_0" in caplog.text


@pytest.mark.parametrize("quantize", some(["int8", "int4"]))
def test_rounded_weights_are_kept_in_the_cache(tmp_path, monkeypatch, quantize):
    """The second load restores them, under a key that names the format."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_gguf(path, tokenizer=TOKENIZER)
    first = _load(path, quantize)
    assert [quantize in each.name for each in (tmp_path / "cache" / "converted").iterdir()] == [
        True
    ]
    second = _load(path, quantize)
    assert first.graphdef == second.graphdef
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_a_folder_has_no_blocks_to_keep(tmp_path):
    """The error says what to pass."""
    import transformers

    from tests.models.hf_checkpoints import VARIANTS

    kind, fields, _ = VARIANTS["llama"]
    getattr(transformers, kind)(**fields).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match="quantize='keep' needs a GGUF file"):
        _load(tmp_path)
