"""Weights from safetensors folders: what is read, and the errors of damaged folders."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.core.errors import CheckpointError, UnknownModelError
from jaxserve.models.safetensors_source import SafetensorsSource

pytestmark = pytest.mark.fast

ARRAY = np.arange(24, dtype=np.float32).reshape(4, 6)


def _write_sharded(folder):
    weight_map = {}
    for i in range(3):
        name, file_name = f"tensor{i}", f"model-{i}.safetensors"
        save_file({name: ARRAY + i}, folder / file_name)
        weight_map[name] = file_name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_shapes_tensors_and_slices(tmp_path):
    """A single file gives shapes from its header, whole tensors and parts of them."""
    save_file({"a": ARRAY, "b": ARRAY[0].copy()}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.shapes() == {"a": (4, 6), "b": (6,)}
    np.testing.assert_array_equal(source.read("a"), ARRAY)
    part = (slice(1, 3), slice(2, 6))
    np.testing.assert_array_equal(source.read("a", part), ARRAY[part])


def test_reads_bfloat16_without_pytorch(tmp_path):
    """bfloat16 tensors come as NumPy arrays of ml_dtypes' bfloat16, whole or sliced."""
    save_file({"a": ARRAY.astype(ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("a").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(source.read("a", (slice(0, 2),)).astype(np.float32), ARRAY[:2])


def test_reads_sharded_folders(tmp_path):
    """Tensors of several files are found through the index."""
    _write_sharded(tmp_path)
    source = SafetensorsSource(tmp_path)
    np.testing.assert_array_equal(source.read("tensor2"), ARRAY + 2)


def test_missing_and_truncated_files_are_reported_together(tmp_path):
    """One error names every missing and every cut-off file, and what to do."""
    _write_sharded(tmp_path)
    (tmp_path / "model-0.safetensors").unlink()
    damaged = tmp_path / "model-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="fetch the files") as caught:
        SafetensorsSource(tmp_path)
    assert len(caught.value.problems) == 2
    assert "model-0.safetensors is missing" in caught.value.problems[0]
    assert "model-1.safetensors is unreadable" in caught.value.problems[1]


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_files_of_another_kind_are_refused(tmp_path, content):
    """A file that is not safetensors is a CheckpointError, whatever it holds."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="unreadable"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "index", ['{"weight_map"', "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}']
)
def test_damaged_index_is_refused(tmp_path, index):
    """An index that is not JSON, or names no files, is a CheckpointError that names it."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="index.json is unreadable"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("outside", ["../other.safetensors", "/tmp/other.safetensors"])
def test_files_outside_the_folder_are_refused(tmp_path, outside):
    """The index names files of its folder, and no way out of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": ARRAY}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": outside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file of the folder"):
        SafetensorsSource(folder)


def test_folder_without_weights_is_unknown(tmp_path):
    """A folder without safetensors files is an unknown model."""
    with pytest.raises(UnknownModelError, match="neither"):
        SafetensorsSource(tmp_path)


def test_a_single_file_counts_before_an_index(tmp_path):
    """A model saved over a sharded one leaves the index; transformers 5.24.0 reads the file."""
    _write_sharded(tmp_path)
    save_file({"a": ARRAY}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).shapes() == {"a": (4, 6)}


@pytest.mark.parametrize("stale", [0, 2])
def test_of_a_tensor_in_two_shards_the_index_decides(tmp_path, stale):
    """A leftover of an earlier save is not read, before or after the right one."""
    _write_sharded(tmp_path)
    file = tmp_path / f"model-{stale}.safetensors"
    own = {f"tensor{stale}": ARRAY + stale, "tensor1": ARRAY[:2] * 0, "unlisted": ARRAY}
    save_file(own, file)
    source = SafetensorsSource(tmp_path)
    np.testing.assert_array_equal(source.read("tensor1"), ARRAY + 1)
    assert source.shapes()["tensor1"] == (4, 6) and "unlisted" in source.shapes()


def test_whole_files_of_two_saves_are_not_to_be_fetched_again(tmp_path):
    """The advice names the index, as the files themselves can be read."""
    _write_sharded(tmp_path)
    save_file({"other": ARRAY}, tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match="index.json is of another save") as caught:
        SafetensorsSource(tmp_path)
    assert "fetch the files" not in str(caught.value)


def test_shards_without_an_index_need_it(tmp_path):
    """The message names the missing index, not a missing checkpoint."""
    save_file({"a": ARRAY}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors.index.json is missing"):
        SafetensorsSource(tmp_path)


def test_a_type_that_numpy_lacks_is_named(tmp_path):
    """Numbers in four bits are refused by name when they are read."""
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"12"
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="type F4"):
        SafetensorsSource(tmp_path).read("a")
