"""Loading holds the weights once."""

from __future__ import annotations

import pytest

from benchmarks.startup import loading
from jaxserve.core.errors import InvalidConfigError

pytestmark = pytest.mark.release


def test_loading_takes_little_more_than_the_checkpoint(tmp_path):
    """Peak resident memory, with mapped files, grows by less than 1.2 times the checkpoint's size.

    40 MB are added for code that loading is the first to run. For 7B models, where
    `benchmarks.startup.loading` counts the whole interpreter, both are negligible.
    """
    figures = loading.measure("small", "bfloat16", tmp_path)
    assert 150e6 < figures["weights_bytes"] < figures["checkpoint_bytes"] < 200e6
    assert figures["num_shards"] == 26
    grown = figures["peak_host_bytes"] - figures["before_bytes"]
    assert grown < 1.2 * figures["checkpoint_bytes"] + 40e6, figures
    assert figures["peak_anonymous_bytes"] <= figures["peak_host_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_noticed_before_writing(tmp_path, monkeypatch):
    """The error has the bytes that are needed."""
    monkeypatch.setitem(loading.SHAPES["small"], "vocab_size", 10**12)
    with pytest.raises(InvalidConfigError, match="disk space .* are needed"):
        loading.measure("small", "bfloat16", tmp_path)
