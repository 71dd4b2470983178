"""How a folder's files say to pool, and the arithmetic of labels and embeddings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from jaxserve.core.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.families import FAMILIES, config_from_hf
from jaxserve.models.pooling import Labels, Pooling, labels_of, pooling_of
from jaxserve.testing.tiny import CONFIG

pytestmark = pytest.mark.fast

CLASSIFIER = {**CONFIG, "architectures": ["LlamaForSequenceClassification"]}


def _write(folder, *modules: str, **pooling):
    parts = [
        {"idx": i, "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(parts))
    for part in parts:
        (folder / part["path"]).mkdir()
        (folder / part["path"] / "config.json").write_text(json.dumps(pooling))


def test_without_files_it_is_the_last_token_normalised(tmp_path):
    """So are Qwen3-Embedding and its relatives trained."""
    assert pooling_of(tmp_path, CONFIG) == Pooling(kind="last", normalize=True)


@pytest.mark.parametrize(
    "given, kind",
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_files_of_sentence_transformers(tmp_path, given, kind):
    """Older and newer files name the mode; embeddings are normalised if a module says it."""
    _write(tmp_path, "Transformer", "Pooling", **given)
    assert pooling_of(tmp_path, CONFIG) == Pooling(kind=kind, normalize=False)
    parts = json.loads((tmp_path / "modules.json").read_text())
    parts.append(
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    )
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    assert pooling_of(tmp_path, CONFIG) == Pooling(kind=kind, normalize=True)


@pytest.mark.parametrize(
    "given",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        {"pooling_mode": "weightedmean"},
        {},
    ],
)
def test_other_modes_are_refused(tmp_path, given):
    """The error names the mode and those that are served."""
    _write(tmp_path, "Transformer", "Pooling", **given)
    with pytest.raises(UnsupportedModelError, match="pooling_mode_lasttoken"):
        pooling_of(tmp_path, CONFIG)


def test_a_mean_without_the_prompt_is_refused(tmp_path):
    """sentence-transformers 6.2.0 leaves the tokens of a prompt out of the mean with this setting.

    For the last token it changes nothing.
    """
    _write(tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True, include_prompt=False)
    with pytest.raises(UnsupportedModelError, match="include_prompt False"):
        pooling_of(tmp_path, CONFIG)
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode": "mean", "include_prompt": True}))
    assert pooling_of(tmp_path, CONFIG).kind == "mean"
    config.write_text(json.dumps({"pooling_mode": "lasttoken", "include_prompt": False}))
    assert pooling_of(tmp_path, CONFIG).kind == "last"


def test_other_modules_are_refused(tmp_path):
    """A further layer would change the embedding."""
    _write(tmp_path, "Transformer", "Pooling", "Dense", pooling_mode_mean_tokens=True)
    with pytest.raises(UnsupportedModelError, match="Dense"):
        pooling_of(tmp_path, CONFIG)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_damaged_files_are_named(tmp_path, content):
    """A file that is cut off, and one of another kind."""
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match="modules.json"):
        pooling_of(tmp_path, CONFIG)


@pytest.mark.parametrize(
    "given, sizes",
    [({"matryoshka_dimensions": [8, 16]}, (8, 16)), ({"is_matryoshka": True}, "any"), ({}, None)],
)
def test_dimensions_of_config_json(tmp_path, given, sizes):
    """vLLM reads the same fields."""
    assert pooling_of(tmp_path, {**CONFIG, **given}).dimensions == sizes


@pytest.mark.parametrize(
    "given, names, activation",
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"0": "no", "10": "c", "2": "b"}}, ("no", "b", "c"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
    ],
)
def test_labels_of_config_json(given, names, activation):
    """Names and probabilities are those of transformers' pipeline."""
    labels = labels_of({**CLASSIFIER, **given}, None)
    assert labels == Labels(names=names, activation=activation)
    assert config_from_hf({**CLASSIFIER, **given}).labels == labels


def test_only_a_classifier_has_labels():
    """Other models generate."""
    config = config_from_hf(CONFIG)
    assert config.labels is None and config.generates
    assert not config_from_hf(CLASSIFIER).generates


def test_padding_that_a_config_json_does_not_state():
    """It is that of transformers' class, for every family with classifiers."""
    for kind in FAMILIES.keys() & MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys():
        wanted = transformers.CONFIG_MAPPING[kind]().pad_token_id
        if kind not in ("t5", "mt5"):
            found = FAMILIES[kind].fields[kind].pad_token_id
            assert found == wanted, f"Fields(pad_token_id={wanted}) of {kind}"


@pytest.mark.parametrize("given, wanted", [({}, 0), ({"pad_token_id": None}, None)])
def test_padding_of_a_family(given, wanted):
    """An absent pad token is that of the class; Gemma's is token 0."""
    gemma = dict(model_type="gemma2", architectures=["Gemma2ForSequenceClassification"], **given)
    labels = config_from_hf(gemma).labels
    assert labels is not None and labels.pad_token_id == wanted


def test_classifiers_of_encoder_decoders_are_refused():
    """Their head is of another kind."""
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        config_from_hf({"model_type": "t5", "architectures": ["T5ForSequenceClassification"]})


def test_padding_at_the_end_does_not_count():
    """The token before it is the last one; of a text of padding it is the first."""
    labels = Labels(names=("a",), pad_token_id=0)
    assert labels.without_padding((0, 5, 0, 0)) == (0, 5)
    assert labels.without_padding((0, 0)) == (0,)
    assert Labels(names=("a",)).without_padding((5, 0)) == (5, 0)


def test_probabilities_and_relevance():
    """Large logits do not overflow."""
    logits = np.array([[0.0, 1000.0], [2.0, 1.0]], np.float32)
    softmax = Labels(names=("no", "yes"), token_ids=(5, 6))
    np.testing.assert_allclose(softmax.probabilities(logits)[0], [0, 1])
    np.testing.assert_allclose(softmax.relevance(logits), softmax.probabilities(logits)[:, 1])
    one = Labels(names=("a",), activation="sigmoid")
    np.testing.assert_allclose(one.relevance(np.array([[0.0], [-1e4]], np.float32)), [0.5, 0.0])
    raw = Labels(names=("a",), activation="none")
    np.testing.assert_allclose(raw.relevance(np.array([[3.0]], np.float32)), [3.0])


def test_cut_embeddings_have_length_one():
    """They are normalised after the cut, and left alone if that is asked for."""
    pooled = np.array([3.0, 4.0, 12.0], np.float32)
    pooling = Pooling()
    np.testing.assert_allclose(pooling.embedding(pooled, dimensions=2), [0.6, 0.8])
    np.testing.assert_allclose(pooling.embedding(pooled, normalize=False), pooled)
    assert not np.isnan(pooling.embedding(np.zeros(2, np.float32))).any()
