"""The programs of docs/own_model.md run as they are pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_model.md"
PROGRAMS = [
    text
    for text in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    if not text.startswith("# skip")
]
LEARNT = [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("program", PROGRAMS, ids=["family", "function"])
def test_a_program_learns_serves_and_saves(program, tmp_path):
    """Ten steps teach the sequence; the whole way has less than 60 lines."""
    assert len(program.splitlines()) < 60
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "JAX_NUMPY_DTYPE_PROMOTION": "standard"},  # as a user has it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss, answer = done.stdout.split(" ", 1)
    assert float(loss) < 2
    assert answer.strip() == str(tuple(LEARNT))
    if (tmp_path / "my_llama").exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my_llama")
        assert model.config.vocab_size == 64
