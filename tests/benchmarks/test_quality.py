"""The benchmark of quality, on a tiny model and by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.quality import FORMATS, LIMITS, main, problems
from tests.models.gguf_models import TOKENIZER, write_gguf

pytestmark = pytest.mark.release


def test_every_format_is_measured_beside_the_unquantised_model(tmp_path, monkeypatch, capsys):
    """Rounding costs something, but little; kept blocks of a float file cost nothing."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tokenizer=TOKENIZER)
    talk = [{"from": "human", "value": "a b ba ab"}, {"from": "gpt", "value": "ab ba a b a b"}]
    records = [{"id": f"{i}_0", "conversations": talk} for i in range(3)]
    (tmp_path / "talks.json").write_text(json.dumps(records))
    code = main(
        [
            *("--model", str(tmp_path / "tiny.gguf"), "--path", str(tmp_path / "talks.json")),
            *("--texts", "2", "--tokens", "8", "--formats", ",".join(FORMATS)),
        ]
    )
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    base, formats = result["unquantised"], result["formats"]
    assert list(formats) == list(FORMATS) and result["num_texts"] == 2
    assert formats["keep"]["perplexity"] == base["perplexity"]
    assert formats["keep"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert 0 < formats["int8"]["divergence"] < formats["int4"]["divergence"]
    for figures in formats.values():
        assert 0 <= figures["agreement"] <= 1 and np.isfinite(figures["perplexity"])
    assert formats["int4"]["weights_bytes"] < formats["int8"]["weights_bytes"]


def test_formats_and_texts_that_are_missing_are_refused(capsys):
    """An unknown format is named."""
    assert main(["--formats", "int8,int3"]) == 2
    assert "'int3'" in capsys.readouterr().err


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_worse_than_it_should_be_is_said(name):
    """A perplexity or divergence over the limit, or NaN, gives a warning each."""
    ratio, divergence = LIMITS[name]
    good = {"perplexity": 10 * ratio, "divergence": divergence}
    assert problems(name, good, 10.0) == []
    assert len(problems(name, {**good, "perplexity": good["perplexity"] * 1.01}, 10.0)) == 1
    assert len(problems(name, {"perplexity": np.nan, "divergence": np.nan}, 10.0)) == 2
