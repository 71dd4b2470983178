"""Loading by name or path, and the cache of converted weights."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.common.environment import status_bytes
from jaxserve.core.errors import CheckpointError, InvalidConfigError, UnknownModelError
from jaxserve.models import converted, huge_pages
from jaxserve.models.families import weights_of
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.gguf import GGUFSource
from jaxserve.models.loading import Parameter, abstract_model, load_params
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.store import LoadedModel, load_model
from jaxserve.sharding import make_mesh
from jaxserve.testing.tiny import letter_tokenizer
from tests.common.tiers import some
from tests.models.gguf_models import TOKENIZER, VOCAB, write_gguf
from tests.models.hf_checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tokenizer=TOKENIZER, tied=True)
    return tmp_path / "tiny.gguf"


def _load(path, **options) -> LoadedModel:
    return load_model(path, progress=False, **options)


def _assert_same_params(one: LoadedModel, other: LoadedModel) -> None:
    assert one.graphdef == other.graphdef
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def _entries(cache: Path) -> list[Path]:
    return sorted((cache / "converted").iterdir())


def _blank_the_weights(path: Path) -> None:
    """Zero the tensors of a GGUF file, which keeps its size and modification time."""
    about = path.stat()
    start = min(info.offset for info in GGUFSource(path).file.tensors.values())
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(about.st_size - start))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16, "layer_layout": "scanned"}])
def test_the_second_load_restores_what_the_first_converted(path, cache, options):
    """The second load equals the first and does not read the tensors of the GGUF file."""
    first = _load(path, **options)
    assert first.params["embedding"][...].dtype == options.get("dtype", jnp.float32)
    assert first.config.dtype == jnp.dtype(options.get("dtype", jnp.float32)).name
    assert first.name == "tiny" and first.source_path == path
    _blank_the_weights(path)
    second = _load(path, **options)
    _assert_same_params(first, second)
    assert (second.config, second.eos_token_ids) == (first.config, (VOCAB - 2,))
    assert second.tokenizer.encode("ab, c") == first.tokenizer.encode("ab, c")
    chat = [{"role": "user", "content": "abc"}]
    assert second.tokenizer.apply_chat_template(chat) == first.tokenizer.encode("abc")
    assert len(_entries(cache)) == 1
    assert not np.asarray(_load(path, cache=False, **options).params["embedding"][...]).any()


def test_a_changed_file_is_converted_again(path, cache):
    """Another file at the same path replaces the cache entry."""
    first = _load(path)
    write_gguf(path, tokenizer=TOKENIZER, tied=True, seed=1)
    second = _load(path)
    assert not np.array_equal(
        first.params["norm"]["scale"][...], second.params["norm"]["scale"][...]
    )
    _assert_same_params(second, _load(path))
    assert len(_entries(cache)) == 1


def test_a_file_that_changes_before_its_converted_form_is_written_is_converted_again(path, cache):
    """The entry is that of the file that was read, however late it is written."""
    kept = converted.ConvertedModel("tiny", path, "float32-unrolled")
    first = _load(path, cache=False)
    assert first.tokenizer is not None
    write_gguf(path, tokenizer=TOKENIZER, tied=True, seed=1)
    kept.save(GGUFSource(path).config, first.tokenizer, first.params)
    assert len(_entries(cache)) == 1
    assert converted.ConvertedModel("tiny", path, "float32-unrolled").read_header() is None


def test_dtype_and_layout_have_entries_of_their_own(path, cache):
    """Variants of one file have separate entries."""
    _load(path)
    _load(path, layer_layout="scanned")
    _load(path, dtype=jnp.bfloat16)
    assert len(_entries(cache)) == 3


def _cut(entry: Path) -> None:
    largest = max((f for f in (entry / "params").rglob("*") if f.is_file()), key=_size)
    os.truncate(largest, _size(largest) // 2)


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize(
    "damage",
    some(
        [
            _cut,
            lambda entry: (entry / "tokenizer.json").unlink(),
            lambda entry: (entry / "entry.json").write_text('{"half": '),
            lambda entry: (entry / "entry.json").unlink(),
        ],
        0,
        1,
    ),
    ids=["cut", "no tokenizer", "half an index", "no index"],
)
def test_a_damaged_entry_is_noticed_and_rebuilt(path, cache, damage, caplog):
    """Loading warns, converts again, and leaves a good entry."""
    first = _load(path)
    (entry,) = _entries(cache)
    damage(entry)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        _assert_same_params(first, _load(path))
    assert "is damaged" in caplog.text
    _blank_the_weights(path)
    _assert_same_params(first, _load(path))


def test_parameters_whose_files_are_overwritten_are_rebuilt(path, cache, caplog):
    """Damage in the files' headers, which leaves sizes unchanged, is detected when restoring."""
    first = _load(path)
    (entry,) = _entries(cache)
    for file in (entry / "params").iterdir():
        file.write_bytes(b"x" * _size(file))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        _assert_same_params(_load(path, cache=False), _load(path))
    assert "is damaged" in caplog.text
    del first


def test_restored_parameters_are_the_files_themselves(path, cache):
    """A file of an entry is mapped, not copied: 64-byte aligned data, on a CPU."""
    _load(path)
    mapped = Path("/proc/self/maps")
    restored = _load(path)
    (entry,) = _entries(cache)
    if mapped.is_file():
        assert str(entry / "params" / "embedding.npy") in mapped.read_text()
    del restored


@pytest.mark.parametrize("uses_huge_pages", [False, True])
def test_large_arrays_are_mapped_unless_huge_pages_are_used(path, uses_huge_pages):
    """Both ways give the same numbers; with huge pages no large array is a file's pages."""
    kept = converted.ConvertedModel("large", path, "float32")
    params = nnx.State({"w": nnx.Param(jnp.arange(150_000, dtype=jnp.float32))})
    kept.save({}, letter_tokenizer(), params)
    found = kept.restore(jax.eval_shape(lambda: params), None, uses_huge_pages=uses_huge_pages)
    np.testing.assert_array_equal(found["w"].get_value(), params["w"].get_value())
    maps = Path("/proc/self/maps")
    if maps.is_file() and huge_pages.are_available():
        is_mapped = str(kept.folder / "params" / "w.npy") in maps.read_text()
        assert is_mapped == (not uses_huge_pages)


def test_a_first_load_without_huge_pages_maps_what_it_converts(path, cache):
    """Its weights are the files of the entry, as those of the second load."""
    first = _load(path, huge_pages=False)
    (entry,) = _entries(cache)
    mapped = Path("/proc/self/maps")
    if mapped.is_file():
        assert str(entry / "params" / "embedding.npy") in mapped.read_text()
    _blank_the_weights(path)
    _assert_same_params(first, _load(path))


class _Ones:
    """A `WeightSource` of ones, which take no memory."""

    where = "ones"

    def __init__(self, shapes):
        self._shapes = shapes

    def shapes(self):
        return self._shapes

    def dtypes(self):
        return dict.fromkeys(self._shapes, "F32")

    def read(self, name, index=None):
        return np.broadcast_to(np.float32(1), self._shapes[name])[index or ()]


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_first_load_holds_one_parameter_at_a_time(path):
    """Its peak is less than the weights: each is in its file before the next is read."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=1024,
        num_layers=6,
        num_heads=4,
        num_kv_heads=4,
        head_dim=256,
    )
    abstract = abstract_model(config)[1]
    table = weights_of(config)
    flat = nnx.to_flat_state(abstract)
    needed = (each for at, v in flat for each in Parameter(at, v, table).needed())
    kept = converted.ConvertedModel("large", path, "float32")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status_bytes("VmHWM")
    change = Quantisation.in_panels(None).change
    params = load_params(abstract, config, _Ones(dict(needed)), change=change, hold=kept.hold)
    grown = status_bytes("VmHWM") - before
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert weights > 150e6 and grown < weights, grown


@pytest.mark.parametrize("uses_huge_pages", [True, False])
def test_a_full_disk_while_saving_still_serves(path, cache, monkeypatch, caplog, uses_huge_pages):
    """The model loads; the log has the reason and a remedy; no partial entry remains."""

    def full(file, array):
        Path(file).touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(converted.np, "save", full)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        model = _load(path, huge_pages=uses_huge_pages)
    assert model.params["embedding"][...].any()
    assert "free some space" in caplog.text and "JAXSERVE_CACHE" in caplog.text
    assert _entries(cache) == []


def test_a_save_removes_what_a_killed_one_left(path, cache):
    """Half-written folders older than a day are removed; that of a running save stays."""
    old, young = (cache / "converted" / name for name in (".save-old", ".save-young"))
    for folder in (old, young):
        (folder / "params").mkdir(parents=True)
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    _load(path)
    assert not old.exists() and young.exists() and len(_entries(cache)) == 2


def test_a_save_removes_the_entries_of_files_that_are_gone(path, cache):
    """Those of files that are there stay, and so does a folder that is no entry."""
    moved, other = path.with_name("moved.gguf"), path.with_name("other.gguf")
    other.write_bytes(path.read_bytes())
    for each in (path, other):
        _load(each)
    (cache / "converted" / "mine").mkdir()
    path.rename(moved)
    assert len(_entries(cache)) == 3
    _load(moved)
    names = {each.name.split("-")[0] for each in _entries(cache)}
    assert names == {"mine", "moved", "other"} and len(_entries(cache)) == 3


def test_an_unwritable_cache_still_serves(path, tmp_path, monkeypatch, caplog):
    """A cache root that cannot be created only causes a warning."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(path / "below-a-file"))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert _load(path).tokenizer.encode("a")
    assert "set JAXSERVE_CACHE" in caplog.text


def test_a_mesh_places_the_parameters(path):
    """Every parameter is where the rules place it, with and without the cache."""
    mesh = make_mesh()
    for _ in range(2):
        params = _load(path, mesh=mesh).params
        for leaf in jax.tree.leaves(params):
            assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
            assert leaf.sharding.mesh == mesh


def test_a_hugging_face_folder_loads_without_conversion(tmp_path, cache):
    """Safetensors are read directly; without a tokenizer, end tokens come from the config."""
    write_checkpoint("llama", tmp_path / "hf")
    model = _load(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert model.config == LlamaConfig.from_hf(config)
    assert model.tokenizer is None and model.eos_token_ids == (config["eos_token_id"],)
    assert not cache.exists()


@pytest.mark.release
def test_random_weights_need_only_a_configuration(tmp_path, path):
    """A folder with only config.json, a LlamaConfig, or a GGUF file is enough; the seed decides."""
    (tmp_path / "hf").mkdir()
    given = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8}
    given |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(given))
    one = _load(tmp_path / "hf", load="random", seed=3)
    other = _load(LlamaConfig.from_hf(given), load="random", seed=3)
    _assert_same_params(one, other)
    assert other.source_path is None and other.tokenizer is None
    half = replace(LlamaConfig.from_hf(given), dtype="bfloat16")
    for dtype, wanted in ((None, "bfloat16"), ("float16", "float16")):
        loaded = _load(half, load="random", dtype=dtype)
        assert loaded.config.dtype == loaded.params["embedding"][...].dtype == wanted
    different = _load(LlamaConfig.from_hf(given), load="random", seed=4)
    assert not np.array_equal(one.params["embedding"][...], different.params["embedding"][...])
    placed = _load(path, load="random", mesh=make_mesh())
    assert placed.tokenizer is not None and placed.config.vocab_size == VOCAB
    assert isinstance(nnx.merge(placed.graphdef, placed.params).embedding[...], jax.Array)


def test_wrong_options_and_names_are_refused(tmp_path):
    """Each gets a typed error with a remedy."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
    )
    with pytest.raises(InvalidConfigError, match="load='random'"):
        _load(config)
    with pytest.raises(InvalidConfigError, match="'auto' or 'random'"):
        _load(config, load="dummy")
    with pytest.raises(UnknownModelError):
        _load("no-such-model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        _load(tmp_path)


def test_a_foreign_tokenizer_is_refused(tmp_path):
    """Ids of a vocabulary larger than the embedding would be out of range."""
    tokens = [*TOKENIZER["ggml.tokens"], "extra"]
    tokenizer = TOKENIZER | {"ggml.tokens": tokens, "ggml.token_type": [1] * len(tokens)}
    write_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match="41 tokens, the model 40"):
        _load(tmp_path / "m.gguf")


def test_a_token_without_an_embedding_is_served(tmp_path, caplog):
    """A [PAD] that was added to the tokenizer and never used is a warning."""
    given = {"model_type": "llama", "vocab_size": 97, "hidden_size": 8, "intermediate_size": 8}
    given |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(given))
    (tmp_path / "tokenizer.json").write_text(letter_tokenizer().to_json(97))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    loaded = _load(tmp_path, load="random")
    assert loaded.tokenizer is not None and loaded.tokenizer.encode("a[PAD]")[-1] == 97
    assert "no embeddings of 1 tokens" in caplog.text and "[PAD]" in caplog.text


def test_a_model_is_there_before_its_converted_form_is_written(path, cache):
    """The next load in the process waits for the thread that writes it, and restores it."""
    first = _load(path, saves_behind=True)
    _blank_the_weights(path)
    _assert_same_params(first, _load(path, saves_behind=True))
    assert len(_entries(cache)) == 1


@pytest.mark.release
def test_the_process_ends_after_the_converted_form_is_written(path, cache):
    """So the next start finds it."""
    program = (
        "import sys\nfrom jaxserve.models.store import load_model\n"
        "load_model(sys.argv[1], progress=False, saves_behind=True)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    (entry,) = _entries(cache)
    assert not entry.name.startswith(".save-")
    first = _load(path, cache=False)
    _blank_the_weights(path)
    _assert_same_params(first, _load(path))


def test_parameters_that_are_deleted_meanwhile_are_not_kept(path, cache, caplog):
    """A warning says so, and nothing is left of the entry."""
    kept = converted.ConvertedModel("large", path, "float32")
    params = nnx.State({"w": nnx.Param(jnp.arange(8, dtype=jnp.float32))})
    params["w"].get_value().delete()
    with caplog.at_level(logging.WARNING, "jaxserve"):
        kept.save_behind({}, letter_tokenizer(), params)
        assert kept.read_header() is None
    assert "were not kept" in caplog.text and _entries(cache) == []
