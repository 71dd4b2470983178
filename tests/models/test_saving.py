"""Folders that are written hold the tensors of the checkpoint that was read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    CheckpointError,
    InvalidConfigError,
    UnknownModelError,
    UnsupportedModelError,
)
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.families import config_from_hf
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.safetensors_source import SafetensorsSource
from jaxserve.models.saving import save_pretrained
from jaxserve.models.store import LoadedModel, load_model
from jaxserve.sharding import StagePlan, make_mesh
from jaxserve.testing.tiny import OPTIONS
from tests.common.tiers import some
from tests.models.gguf_models import TOKENIZER, write_gguf
from tests.models.hf_checkpoints import (
    MAIN,
    VARIANTS,
    attention_of,
    torch_logits,
    write_checkpoint,
)


def _load(path: Path, **options) -> LoadedModel:
    return load_model(path, progress=False, cache=False, **options)


def _save(loaded: LoadedModel, folder: Path, **options) -> None:
    save_pretrained(
        folder,
        loaded.params,
        loaded.config,
        loaded.source_path,
        tokenizer=loaded.tokenizer,
        **options,
    )


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    source = SafetensorsSource(folder)
    return {name: source.read(name) for name in source.shapes()}


@pytest.mark.parametrize("variant", some(VARIANTS, *map(list(VARIANTS).index, MAIN)))
def test_a_family_is_written_as_it_was_read(tmp_path, variant):
    """PyTorch reads what was written, misses nothing, and computes the same logits."""
    model = write_checkpoint(variant, tmp_path / "read")
    loaded = _load(tmp_path / "read")
    _save(loaded, tmp_path / "new")
    given, written = _tensors(tmp_path / "read"), _tensors(tmp_path / "new")
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, given[name], err_msg=name)
    again, about = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new",
        dtype=torch.float32,
        attn_implementation=attention_of(variant),
        output_loading_info=True,
    )
    assert not any(about[each] for each in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    tokens = np.arange(23) * 7 % model.config.vocab_size
    np.testing.assert_array_equal(torch_logits(again.eval(), tokens), torch_logits(model, tokens))


def test_other_constants_are_refused(tmp_path):
    """Apertus' activation has two numbers beside its weights, which are the same in all models."""
    write_checkpoint("apertus", tmp_path)
    tensors = _tensors(tmp_path) | {"model.layers.1.mlp.act_fn.beta": np.array(0.7, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="beta is 0.7, and only 0.5 is served"):
        _load(tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    write_checkpoint("llama", folder)
    return folder


@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
def test_stored_in_panels(tmp_path, llama, layout):
    """Weights that were changed for the CPU's kernel, and stacked layers, are written unchanged."""
    how = Quantisation.in_panels(None) if layout == "unrolled" else None
    loaded = _load(llama, layer_layout=layout, quantisation=how)
    _save(loaded, tmp_path / "new", layer_layout=layout)
    written = _tensors(tmp_path / "new")
    assert written.keys() == _tensors(llama).keys()
    for name, tensor in _tensors(llama).items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


def test_several_files(tmp_path, llama):
    """Large weights are cut into files with an index, which transformers and we read."""
    _save(_load(llama), tmp_path / "new", file_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    given = _tensors(llama)
    assert _tensors(tmp_path / "new").keys() == given.keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    for name, tensor in again.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), given[name], err_msg=name)


@pytest.mark.parametrize(
    "options",
    some(
        [dict(max_adapters=1), dict(mesh=make_mesh(tensor=2)), dict(mesh=make_mesh(data=2))], 0, 1
    ),
    ids=["adapters", "tensor", "data"],
)
def test_what_a_runtime_serves(tmp_path, llama, options):
    """Without its adapters, and from all shards; it goes on serving."""
    given = OPTIONS | dict(max_context=64) | options
    with Runtime.from_pretrained(str(llama), **given) as rt:
        before = rt.generate([1, 2, 3], SamplingParams(max_tokens=4)).token_ids
        rt.save_pretrained(tmp_path / "new")
        assert rt.generate([1, 2, 3], SamplingParams(max_tokens=4)).token_ids == before
    written = _tensors(tmp_path / "new")
    assert written.keys() == _tensors(llama).keys()
    for name, tensor in _tensors(llama).items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


def test_weights_in_parts_are_refused(tmp_path, llama):
    """Those of stages; nothing is written."""
    stages = StagePlan.of([1, _load(llama).config.num_layers - 1])
    with Runtime.from_pretrained(str(llama), **OPTIONS, max_context=64, mesh=stages) as rt:
        with pytest.raises(InvalidConfigError, match="in stages.*cannot be saved"):
            rt.save_pretrained(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_half_precision(tmp_path, llama):
    """The dtype of the model is that of the files and of config.json."""
    _save(_load(llama, dtype="bfloat16"), tmp_path / "new")
    assert set(SafetensorsSource(tmp_path / "new").dtypes().values()) == {"BF16"}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoConfig.from_pretrained(tmp_path / "new").dtype == torch.bfloat16


def test_gguf_becomes_a_folder(tmp_path):
    """The folder of a GGUF file has the same model and a tokenizer that transformers reads."""
    write_gguf(tmp_path / "tiny.gguf", tokenizer=TOKENIZER, tied=True)
    loaded = _load(tmp_path / "tiny.gguf")
    _save(loaded, tmp_path / "new")
    again = _load(tmp_path / "new")
    assert again.config == loaded.config
    for (path, one), (_, other) in zip(
        nnx.to_flat_state(loaded.params), nnx.to_flat_state(again.params), strict=True
    ):
        np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=str(path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert loaded.tokenizer is not None
    assert theirs.encode("the cat") == loaded.tokenizer.encode("the cat")
    assert theirs.eos_token_id == loaded.eos_token_ids[0]


def test_a_folder_with_files_is_not_overwritten(tmp_path, llama):
    """The message says so; nothing is left of the attempt."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("kept")
    with pytest.raises(InvalidConfigError, match="not an empty folder; give a new path"):
        _save(_load(llama), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_weights_in_few_bits_are_refused(tmp_path, llama):
    """Read weights cannot be had back from rounded ones. Half a folder never appears."""
    how = Quantisation.at_loading(RuntimeOptions.parse({"quantize": "int8"}), None)
    with pytest.raises(UnsupportedModelError, match="few bits.*without quantize"):
        _save(_load(llama, quantisation=how), tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.fast
def test_a_folder_without_configuration_is_refused(tmp_path):
    """`like` is checked before anything is written."""
    config = config_from_hf({"model_type": "llama"})
    with pytest.raises(UnknownModelError, match=r"holds no config\.json"):
        save_pretrained(tmp_path / "new", nnx.State({}), config, tmp_path)
    assert not list(tmp_path.iterdir())
