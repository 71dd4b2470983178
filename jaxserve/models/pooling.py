"""What a model makes of a text besides tokens: an embedding, or the logits of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Float32

from jaxserve.core.errors import CheckpointError, UnsupportedModelError

Activation = Literal["softmax", "sigmoid", "none"]

_CLASSIFIER = "ForSequenceClassification"
_MODULES = "modules.json"
# Ways to pool in sentence-transformers' files that are served.
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_NAMES = {"lasttoken": "last", "mean": "mean"}


@final
@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How the hidden states of a text become its embedding.

    Attributes:
      kind: the hidden state of the last token, or the mean over all tokens.
      normalize: whether the embedding is divided by its length.
      dimensions: sizes to which it may be cut (Matryoshka embeddings); None if the model's files
        name none, "any" if they allow all.
    """

    kind: Literal["last", "mean"] = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] | Literal["any"] | None = None

    def embedding(
        self,
        pooled: Float32[np.ndarray, " width"],
        *,
        normalize: bool | None = None,  # None for the model's own choice
        dimensions: int | None = None,
    ) -> Float32[np.ndarray, " dimensions"]:
        """Return the embedding of a pooled text."""
        found = pooled[:dimensions]
        if self.normalize if normalize is None else normalize:
            found = found / max(float(np.linalg.norm(found)), 1e-12)
        return found.astype(np.float32)


@final
@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels that a model scores for a text, by the hidden state of its last token.

    Attributes:
      names: of the labels, in order.
      activation: what turns logits into probabilities, as in transformers' pipeline.
      pad_token_id: such tokens at the end of a text do not count; None for none.
      token_ids: tokens of the vocabulary whose logits are those of the labels; empty for a model
        with a head for labels.
      template: text of a pair for `rerank`, with {instruction}, {query} and {document}; None for
        the tokenizer's way to encode pairs.
    """

    names: tuple[str, ...]
    activation: Activation = "softmax"
    pad_token_id: int | None = None
    token_ids: tuple[int, ...] = ()
    template: str | None = None

    def probabilities(
        self, logits: Float32[np.ndarray, "*texts labels"]
    ) -> Float32[np.ndarray, "*texts labels"]:
        if self.activation == "none":
            return logits
        if self.activation == "sigmoid":
            return _sigmoid(logits)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    @property
    def ranks(self) -> bool:
        """Whether the logits are a relevance: one label, or the tokens of "no" and "yes"."""
        return len(self.names) == 1 or len(self.token_ids) == 2

    def relevance(self, logits: Float32[np.ndarray, "*texts labels"]) -> np.ndarray:
        """Return the relevance of pairs; only if the model `ranks`."""
        if len(self.names) == 1:
            return self.probabilities(logits)[..., 0]
        return _sigmoid(logits[..., 1] - logits[..., 0])

    def without_padding(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return a text up to its last token that counts; the first token if none does."""
        end = len(tokens)
        while end > 0 and tokens[end - 1] == self.pad_token_id:
            end -= 1
        return tokens[: end or 1]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (0.5 * (1.0 + np.tanh(0.5 * x))).astype(np.float32)


def labels_of(given: Mapping[str, Any], pad_token_id: int | None) -> Labels | None:
    """Return the labels of a model by its config.json; None for a model of another kind."""
    kinds = given.get("architectures") or ()
    if not any(str(kind).endswith(_CLASSIFIER) for kind in kinds):
        return None
    by_id = given.get("id2label")
    if isinstance(by_id, Mapping) and by_id:
        names = tuple(str(by_id[key]) for key in sorted(by_id, key=int))
    else:
        names = tuple(f"LABEL_{i}" for i in range(given.get("num_labels") or 2))
    return Labels(names=names, activation=_activation(given, len(names)), pad_token_id=pad_token_id)


def _activation(given: Mapping[str, Any], num_labels: int) -> Activation:
    problem = given.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def pooling_of(folder: Path, given: Mapping[str, Any]) -> Pooling:
    """Return how a folder's files, those of sentence-transformers and config.json, say to pool.

    Without sentence-transformers' files it is the last token, normalised.

    Raises:
      CheckpointError: a file cannot be read.
      UnsupportedModelError: the files ask for another way to pool, or for further layers.
    """
    dimensions = given.get("matryoshka_dimensions")
    sizes: Any = None
    if dimensions:
        sizes = tuple(dimensions)
    elif given.get("is_matryoshka"):
        sizes = "any"
    modules = _read(folder / _MODULES, list)
    if modules is None:
        return Pooling(dimensions=sizes)
    kind: Any = "last"
    normalize = False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(folder / str(module.get("path", "")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise UnsupportedModelError(
                f"{folder / _MODULES} has a module {module.get('type')!r}, which is not served; "
                "served are Transformer, Pooling and Normalize. Remove it from the file to have "
                "the embedding without it"
            )
    return Pooling(kind=kind, normalize=normalize, dimensions=sizes)


def _kind(path: Path) -> str:
    given = _read(path, dict) or {}
    name = given.get("pooling_mode")  # the newer form
    modes = [key for key, value in given.items() if key.startswith("pooling_mode_") and value]
    kind = _NAMES.get(name) if isinstance(name, str) else None
    if name is None and len(modes) == 1:
        kind = _MODES.get(modes[0])
    if kind is None:
        raise UnsupportedModelError(
            f"{path} pools by {name or modes or 'no mode'}; served are {' and '.join(_MODES)}, "
            "one of them"
        )
    if kind == "mean" and not given.get("include_prompt", True):
        raise UnsupportedModelError(
            f"{path} has include_prompt {given['include_prompt']!r}: the mean leaves out the "
            "tokens of a prompt, which here is a part of the text. For texts without prompts, "
            "set it to true"
        )
    return kind


def _read(path: Path, kind: type) -> Any:
    """Return a JSON file's content of a kind; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(path), [f"it cannot be read: {error}"], "fetch it again"
        ) from error
    if not isinstance(content, kind):
        raise CheckpointError(str(path), [f"it is not a JSON {kind.__name__}"], "fetch it again")
    return content
