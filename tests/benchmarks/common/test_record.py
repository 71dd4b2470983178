"""A result file keeps its figures, whatever happens later, and failures are seen."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.harness import Record, nothing_failed, some_of
from jaxserve.core.errors import InvalidConfigError

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
    assert record.add("rows", "late", lambda: {"us": 1}) is None
    assert record.result == {"failed": {}, "skipped": ["late"]}


def test_failures_are_found_at_any_depth():
    """Reasons, numbers of failed requests and errors count; errors of figures, and runs do not."""
    fine = {"error": 1e-4, "num_failed": 0, "failed": {}, "error_of": None}
    assert nothing_failed(
        {
            "cases": [fine, {"error": {"p99_s": 0.1}}],
            "runs": [{"num_failed": 1}],
            "range": {"num_failed": [0, 1]},
        }
    )
    for found in ({"num_failed": 1}, {"failed": {"a": "no"}}, {"error": "no wheel"}):
        assert not nothing_failed({"cases": [fine, {"ours": found}]})


def test_names_are_some_of_the_known_ones():
    """The error has what was given and what is allowed."""
    assert some_of("b,a", "--only", {"a": 1, "b": 2}) == ["b", "a"]
    with pytest.raises(InvalidConfigError, match=r"--only 'b,c': \['c'\] .* some of a,b"):
        some_of("b,c", "--only", ("a", "b"))
