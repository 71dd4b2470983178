"""Letters to phonemes: the same phonemes as the package's own code gives, alone and in any mix."""

from __future__ import annotations

import ast
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.cells import CellRuntime
from jaxserve.cells.models import load_g2p
from jaxserve.cells.models.g2p import LETTERS, PHONEMES, WEIGHTS
from jaxserve.cells.policies import GraphMerging, LazyBatching, OneAtATime, Padding
from jaxserve.core.assets import WheelFile, fetch_together
from jaxserve.core.errors import InvalidGraphError

CODE = WheelFile(
    package=WEIGHTS.package,
    version=WEIGHTS.version,
    member="g2p_en/g2p.py",
    size_bytes=7637,
    sha256="fc2548b855e102f774506a6afe4f4bc88424229b69701ab6040aa16710ddff3a",
    wheel_bytes=WEIGHTS.wheel_bytes,
    license=WEIGHTS.license,
)
HOMOGRAPHS = WheelFile(
    package=WEIGHTS.package,
    version=WEIGHTS.version,
    member="g2p_en/homographs.en",
    size_bytes=18_711,
    sha256="0403edcc6aefe8945f8987be398279fd98bf6b767e54b741331d3bc99a307071",
    wheel_bytes=WEIGHTS.wheel_bytes,
    license=WEIGHTS.license,
)
# What `predict` needs; the rest of the class needs NLTK and its dictionary.
METHODS = {"__init__", "load_variables", "sigmoid", "grucell", "gru", "encode", "predict"}


@pytest.fixture(scope="module")
def published() -> Any:
    """Return the package's `G2p`, without the dictionary."""
    path, *_ = fetch_together([CODE, HOMOGRAPHS, WEIGHTS], progress=False)
    with warnings.catch_warnings(action="ignore"):  # of an escape in a method that is not used
        tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "G2p"]
    found.body = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name in METHODS]
    scope: dict[str, Any] = {
        **{"np": np, "os": os, "dirname": str(path.parent)},
        "cmudict": SimpleNamespace(dict=dict),
        "construct_homograph_dictionary": dict,
    }
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    return scope["G2p"]()


@pytest.fixture(scope="module")
def words() -> list[str]:
    """Return the words of the package's list of homographs, and some odd ones."""
    lines = Path(HOMOGRAPHS.path).read_text(encoding="utf-8").splitlines()
    listed = [line.partition("|")[0].lower() for line in lines if not line.startswith("#")]
    license = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    texts = sorted(set(re.findall("[a-z]{3,}", license.lower())))
    return [*listed, *texts, "q", "xyzzy", "it's", "antidisestablishmentarianism", "naïve"]


def test_symbols_are_the_published_ones(published):
    """Letters and phonemes have the ids that the weights were trained with."""
    assert list(LETTERS) == published.graphemes and list(PHONEMES) == published.phonemes


@pytest.mark.release
def test_phonemes_are_those_of_the_package(published, words):
    """Several hundred words, all at once."""
    assert len(words) > 500
    g2p = load_g2p(batch_sizes=(1, 16), progress=False)
    with CellRuntime(g2p.model.cells, g2p.model.unfold, progress=False) as rt:
        done = rt.generate(words)
        wrong = {
            word: (found, expected)
            for word, one in zip(words, done, strict=True)
            if (found := g2p.phonemes(one["token"])) != (expected := published.predict(word))
        }
        assert wrong == {}
        with pytest.raises(InvalidGraphError, match="pass a word"):
            rt.submit(7)


@pytest.mark.release
@pytest.mark.parametrize(
    "policy",
    [
        Padding(bucket_width=4),
        GraphMerging(max_graphs=5),
        OneAtATime(),
        LazyBatching(cell_s={"encoder": 1e-4, "decoder": 1e-4}),
    ],
    ids=lambda policy: policy.name,
)
def test_every_policy_gives_the_same_phonemes(published, policy):
    """What a word becomes does not depend on its batch."""
    some = ["cell", "batching", "of", "recurrent", "networks", "antidisestablishmentarianism", "a"]
    g2p = load_g2p(batch_sizes=(1, 16), progress=False)
    options = {"policy": policy, "warmup": False, "progress": False}
    with CellRuntime(g2p.model.cells, g2p.model.unfold, **options) as rt:
        done = rt.generate(some)
    assert [g2p.phonemes(one["token"]) for one in done] == [published.predict(w) for w in some]
