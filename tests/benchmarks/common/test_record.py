"""A result file keeps its figures, whatever happens to the later measurements."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.harness import Record

pytestmark = pytest.mark.fast


def test_the_file_is_whole_after_every_figure(tmp_path):
    """The file has figures, failures with their reasons, and the measurements that had no time."""
    path = tmp_path / "sub" / "result.json"
    record = Record(path, None, benchmark="some")

    def fails() -> None:
        raise RuntimeError("out of\nmemory " + "x" * 5000)

    assert record.add("rows", "first", lambda: {"us": 1}) == {"us": 1}
    assert json.loads(path.read_text())["rows"] == [{"us": 1}]
    assert record.add("rows", "second", fails) is None
    reason = json.loads(path.read_text())["failed"]["second"]
    assert reason.startswith("RuntimeError: out of memory")
    assert len(reason) < 700
    record.add("rows", "third", lambda: {"us": 3})
    assert json.loads(path.read_text()) == record.result
    assert record.result["rows"] == [{"us": 1}, {"us": 3}]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_nothing_begins_when_the_time_is_over(tmp_path):
    """The measurement is named among the skipped ones."""
    record = Record(tmp_path / "result.json", 0.0)
    assert record.is_spent
    assert record.add("rows", "late", lambda: {"us": 1}) is None
    assert record.result == {"failed": {}, "skipped": ["late"]}
