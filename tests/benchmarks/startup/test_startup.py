"""`benchmarks.startup` says where the seconds of a start go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.startup.starts import start
from tests.models.gguf_models import TOKENIZER, write_gguf

pytestmark = pytest.mark.release


def test_a_second_start_loads_what_the_first_compiled(tmp_path):
    """Every part has its seconds, and the executables of the answer are loaded, not compiled."""
    model = tmp_path / "tiny.gguf"
    write_gguf(model, "llama", tokenizer=TOKENIZER)
    settings = {"max_slots": 2, "max_step_tokens": 16, "max_context": 64, "kv_memory": "2MB"}
    settings |= {"warmup": "full", "host_memory": 0}
    cache = tmp_path / "cache"
    cache.mkdir()
    kernels = Path(os.environ["PALLAS_KERNELS_CACHE"])
    kernels.mkdir(parents=True, exist_ok=True)  # compiled in tests before, most likely
    (cache / "kernels").symlink_to(kernels, target_is_directory=True)
    cold, warm = (start(str(model), settings, str(cache)) for _ in range(2))
    assert cold["num_loaded"] == 0 < cold["num_compiled"]
    assert warm["num_compiled"] == 0 < warm["num_loaded"]
    for figures in (cold, warm):
        for part in ("interpreter", "imports", "tokenizer", "weights", "cache", "first_answer"):
            assert 0 < figures[f"{part}_s"] < figures["first_token_s"], part
        names = {each["name"] for each in figures["executables"]}
        assert {"mixed_body", "mixed_head", "admit"} <= names
        assert figures["resident_bytes"] > 50e6
