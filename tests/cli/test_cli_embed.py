"""`jaxserve embed`, on a tiny model with random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxserve.testing import write_chat_model
from tests.cli.common import run

SMALL = ("--load", "random", "--max-slots", "1", "--max-context", "64", "--quiet")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_chat_model(tmp_path_factory.mktemp("tiny"))


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_texts_become_lines(model, tmp_path):
    """From arguments, stdin and JSON lines, in their order."""
    done = run("embed", "a b", "c", "--model", model, *SMALL)
    assert done.exit_code == 0, done.output
    first, second = _lines(done.stdout)
    assert (first["id"], first["text"]) == (0, "a b")
    assert np.linalg.norm(second["embedding"]) == pytest.approx(1, abs=1e-5)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "c", "id": "x"}\n\n{"text": [1, 2]}\n')
    files = "--jsonl", str(source), "-o", str(target)
    done = run("embed", "--model", model, *files, "--dimensions=5", "--no-normalize", *SMALL)
    assert done.exit_code == 0, done.output
    named, tokens = _lines(target.read_text())
    assert (named["id"], tokens["id"], tokens["text"]) == ("x", 1, [1, 2])
    cut = np.array(named["embedding"])
    np.testing.assert_allclose(
        cut / np.linalg.norm(cut),
        np.array(second["embedding"][:5]) / np.linalg.norm(second["embedding"][:5]),
        atol=1e-5,
    )
    done = run("embed", "--model", model, *SMALL, given="c\n\na b\n")
    assert [line["text"] for line in _lines(done.stdout)] == ["c", "a b"]


@pytest.mark.fast
@pytest.mark.parametrize(
    "arguments, given, said",
    [
        ((), "\n", "no texts"),
        (("a", "--file", "b"), "", "one way"),
        (("a", "--replicas", "2"), "", "one runtime"),
        (("--jsonl", "{}"), "[1]", "line 1"),
        (("--jsonl", "{}"), '{"text": "a", "more": 1}', "line 1"),
        (("--jsonl", "{}"), "{", "not JSON"),
    ],
)
def test_bad_input(tmp_path, arguments, given, said):
    """Each is refused before a model is loaded."""
    path = tmp_path / "texts"
    path.write_text(given)
    arguments = [str(path) if each == "{}" else each for each in arguments]
    done = run("embed", *arguments, "--model", "none", given=given)
    assert done.exit_code != 0 and said in done.stderr
