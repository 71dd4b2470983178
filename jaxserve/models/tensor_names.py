"""The names of a checkpoint's tensors: what wrappers add, bare models, and tied heads."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from operator import methodcaller
from typing import final

import numpy as np

from jaxserve.models.config import DecoderConfig
from jaxserve.models.families import family_of
from jaxserve.models.source import WeightSource

_log = logging.getLogger(__name__)

# Parts of names that wrappers add.
_ANYWHERE = r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."
_IN_FRONT = ("module.", "base_model.model.", "language_model.")
_HEADS = ("lm_head.", "embed_out.")
# Numbers of two tensors that are compared at a time.
_COMPARED = 1 << 22


def under_own_names(source: WeightSource, config: DecoderConfig) -> WeightSource:
    """Return the source with its tensors under the names that the family has for them.

    Wrappers' parts of names are dropped: those of `torch.compile`, FSDP and checkpointing anywhere,
    those of DDP, PEFT and models of images and text where all names begin with them. A bare model
    gets its family's prefix, and a head alone is the embedding, too, where both are tied.
    """
    prefix = family_of(config).prefix
    names = {own: re.sub(_ANYWHERE, "", own) for own in source.shapes()}
    while begin := next((each for each in _IN_FRONT if _all_begin(names, each)), None):
        names = {own: name.removeprefix(begin) for own, name in names.items()}
    inner = f"{prefix}language_model."
    if _all_begin(names, inner, *_HEADS):
        names = {own: name.replace(inner, prefix, 1) for own, name in names.items()}
    source = _renamed(source, names)
    embedding, head = tied_names(config)
    if embedding.removeprefix(prefix) in source.shapes():
        source = with_prefix(source, prefix)
    if not config.tie_word_embeddings or embedding in source.shapes():
        return source
    return _renamed(source, {n: embedding if n == head else n for n in source.shapes()})


def with_prefix(source: WeightSource, prefix: str) -> WeightSource:
    """Return the source, with `prefix` before its names if it holds the bare model."""
    names = source.shapes()
    if any(name.startswith(prefix) for name in names):
        return source
    return _renamed(source, {n: n if n.startswith(_HEADS) else prefix + n for n in names})


def fitted(config: DecoderConfig, source: WeightSource) -> DecoderConfig:
    """Return the configuration of these tensors, under their own names, where config.json differs.

    A head of its own counts where it is not the embedding, whatever `tie_word_embeddings` says, as
    in transformers 5.
    """
    config = config.fitted_to(source.shapes().keys())
    embedding, head = tied_names(config)
    if config.tie_word_embeddings and not _are_equal(source, embedding, head):
        _log.warning(
            "%s ties %s to %s in config.json and has both, which differ: each is used as it is",
            source.where,
            head,
            embedding,
        )
        return replace(config, tie_word_embeddings=False)
    return config


def _all_begin(names: Mapping[str, str], *begins: str) -> bool:
    """Return whether all names begin with one of these, and one with the first."""
    values = names.values()
    return any(map(methodcaller("startswith", begins[0]), values)) and all(
        map(methodcaller("startswith", begins), values)
    )


def _renamed(source: WeightSource, names: Mapping[str, str]) -> WeightSource:
    """Return the source with other names; itself if they stay or two would be one."""
    if all(own == name for own, name in names.items()) or len(set(names.values())) < len(names):
        return source
    return _Renamed(source, {name: own for own, name in names.items()})


def tied_names(config: DecoderConfig) -> tuple[str, str]:
    """Return the names of the embedding and of the head."""
    weights = family_of(config).weights(config)
    return weights["embedding"].tensors[0].name, weights["lm_head"].tensors[0].name


def _are_equal(source: WeightSource, one: str, other: str) -> bool:
    """Return whether two tensors, where both are there, have the same numbers."""
    shapes = source.shapes()
    if one not in shapes or other not in shapes:
        return True
    num_rows, width = shapes[one]
    step = max(1, _COMPARED // max(1, width))
    parts = (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))
    return shapes[one] == shapes[other] and all(
        np.array_equal(source.read(one, (part,)), source.read(other, (part,))) for part in parts
    )


@final
class _Renamed:
    """A `WeightSource` under other names.

    Args:
      names: the source's own name of each tensor.
    """

    def __init__(self, source: WeightSource, names: Mapping[str, str]):
        self.where = source.where
        self._source = source
        self._names = names

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource`."""
        shapes = self._source.shapes()
        return {name: shapes[own] for name, own in self._names.items()}

    def dtypes(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        dtypes = self._source.dtypes()
        return {name: dtypes[own] for name, own in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """See `WeightSource`."""
        return self._source.read(self._names.get(name, name), index)
