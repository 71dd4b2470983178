"""Tuning: the search, and the table that it writes and runtimes read."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.common.harness import Record
from benchmarks.kernels.tune import descend, main, write_entry
from jaxserve.kernels.gpu import GPUS
from jaxserve.kernels.paged_attention import tilings
from jaxserve.kernels.paged_attention.tilings import entry_for, is_tuned, tiling_for

pytestmark = pytest.mark.release

VALUES = {("a",): (1, 2, 3), ("b", "c"): (1, 2, 3)}
HEADS = dict(device=GPUS["h100"].kind, num_cores=GPUS["h100"].num_cores, kv_heads=8)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of tuned entries for this test only."""
    path = tmp_path / "tuned.toml"
    monkeypatch.setattr(tilings, "TUNED", path)
    return path


def test_the_fastest_values_win():
    """Each value is found after the previous ones; shapes are weighted by their first times."""
    begin = {"a": 2, "b": {"c": 2}}

    def seconds(entry: dict) -> list[float]:
        if entry["a"] == 3:
            raise ValueError("too much shared memory")
        # The second shape takes much longer, and must not outweigh the first.
        return [1.0 + entry["a"], 1000.0 - 10 * entry["b"]["c"]]

    record = Record(None, None, tried=[])
    best = descend(begin, VALUES, seconds, record)
    scores = {
        (a, c): seconds({"a": a, "b": {"c": c}}) for a, c in itertools.product((1, 2), (1, 2, 3))
    }
    first = scores[2, 2]
    sums = {key: sum(x / y for x, y in zip(own, first, strict=True)) for key, own in scores.items()}
    assert (best["a"], best["b"]["c"]) == min(sums, key=lambda key: sums[key]) == (1, 3)
    assert begin == {"a": 2, "b": {"c": 2}}
    (refused,) = [row for row in record.result["tried"] if "reason" in row]
    assert (refused["place"], refused["value"]) == ("a", 3)
    assert "shared memory" in refused["reason"]


def test_no_time_leaves_the_entry_as_it_is():
    """The values that were not tried are named."""
    record = Record(None, 0.0, tried=[])
    begin = {"a": 2, "b": {"c": 2}}
    assert descend(begin, VALUES, lambda entry: [1.0], record) == begin
    assert record.result["skipped"] == ["a=1", "a=3", "b.c=1", "b.c=3"]


def test_what_is_written_is_what_runtimes_take(table):
    """The entry is only for these heads on this device, and replaces the old one."""
    general = entry_for(device=GPUS["h100"].kind, group=4, head_dim=128, kind="triton")
    assert not is_tuned(GPUS["h100"].kind)
    for rows in (64, 128):
        entry = {
            "device": GPUS["h100"].kind,
            "group": 4,
            "head_dim": 128,
            "source": 'timed, "here"',
            "command": "python -m benchmarks.kernels.tune --heads 8x4x128",
            "block_keys": 32,
            "split_keys": 256,
            "split": {"rows": 16, "programs": 6, "warps": 2, "stages": 4},
            "tile": {"rows": rows, "programs": 1, "warps": 8, "stages": 2},
            "merge": {"warps": 2, "stages": 1},
        }
        write_entry(table, "triton", entry)
        write_entry(table, "mosaic", {**entry, "group": 2})
    tilings._entries.cache_clear()
    assert is_tuned(GPUS["h100"].kind)
    assert table.read_text().count("[[triton]]") == 1
    found = entry_for(device=GPUS["h100"].kind, group=4, head_dim=128, kind="triton")
    assert found == entry
    tiling = tiling_for(**HEADS, group=4, head_dim=128)
    assert (tiling.launches.block_keys, tiling.split_keys, tiling.tile_rows) == (32, 256, 128)
    assert tiling.split_programs == 6 * GPUS["h100"].num_cores
    assert tiling.launches.split.num_warps == 2
    for other in (
        dict(device=GPUS["h100"].kind, group=8, head_dim=128),
        dict(device=GPUS["h100"].kind, group=4, head_dim=64),
        dict(device="NVIDIA A100", group=4, head_dim=128),
    ):
        assert entry_for(**other, kind="triton")["source"] == "compiler"
    assert general["source"] == "compiler"
    assert entry_for(device=GPUS["h100"].kind, group=2, head_dim=128, kind="mosaic")["group"] == 2


def test_tiles_are_tuned_on_a_gpu_only(capsys, table):
    """Without a GPU the command says so and writes nothing."""
    assert main(["--heads", "8x4x128"]) == 2
    assert "there is none here" in capsys.readouterr().err
    assert main(["--heads", "8x4"]) == 2
    assert "--heads '8x4': pass whole numbers, as 8x4x128" in capsys.readouterr().err
    assert not table.exists()
