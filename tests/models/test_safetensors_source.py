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
