"""`jaxserve embed`, on a tiny model with random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.cli.common import SMALL, run


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.release
def test_texts_become_lines(model, tmp_path):
    """From arguments, stdin and JSON lines, in their order."""
    embed = f"embed --model {model} {SMALL}"
    done = run(embed, "a b", "c")
    assert done.exit_code == 0, done.output
    first, second = _lines(done.stdout)
    assert (first["id"], first["text"]) == (0, "a b")
    assert np.linalg.norm(second["embedding"]) == pytest.approx(1, abs=1e-5)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "c", "id": "x"}\n\n{"text": [1, 2]}\n')
    done = run(f"{embed} --jsonl {source} -o {target} --dimensions=5 --no-normalize")
    assert done.exit_code == 0, done.output
    named, tokens = _lines(target.read_text())
    assert (named["id"], tokens["id"], tokens["text"]) == ("x", 1, [1, 2])
    cut = np.array(named["embedding"])
    np.testing.assert_allclose(
        cut / np.linalg.norm(cut),
        np.array(second["embedding"][:5]) / np.linalg.norm(second["embedding"][:5]),
        atol=1e-5,
    )
    done = run(embed, given="c\n\na b\n")
    assert [line["text"] for line in _lines(done.stdout)] == ["c", "a b"]


@pytest.mark.fast
@pytest.mark.parametrize(
    "arguments, given, said",
    [
        ("", "\n", "no texts"),
        ("a --file b", "", "one way"),
        ("a --replicas 2", "", "one runtime"),
        ("--jsonl {}", "[1]", "line 1"),
        ("--jsonl {}", '{"text": "a", "more": 1}', "line 1"),
        ("--jsonl {}", "{", "not JSON"),
    ],
)
def test_bad_input(tmp_path, arguments, given, said):
    """Each is refused before a model is loaded."""
    path = tmp_path / "texts"
    path.write_text(given)
    done = run(f"embed --model none {arguments.format(path)}", given=given)
    assert done.exit_code != 0 and said in done.stderr
