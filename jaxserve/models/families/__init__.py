"""All families of models: the `FAMILY` of each file here (docs/adding_a_model.md)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, check_sizes
from jaxserve.models.family import Family

_ALL: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {kind: family for family in _ALL for kind in family.fields}
)
# Models of images and text, and whether the head of their text model is the embedding if
# config.json does not state it.
WRAPPERS: Mapping[str, bool] = MappingProxyType(
    {
        "gemma3": True,
        "llava": False,
        "mistral3": True,
        "qwen2_vl": False,
        "qwen2_5_vl": False,
        "qwen3_vl": False,
    }
)


def config_from_hf(given: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a model of any family, from config.json as a dictionary.

    For a model of images and text, it is that of the text model.

    Raises:
      UnsupportedModelError: naming what is given and what is supported.
    """
    kind = str(given.get("model_type"))
    if kind in WRAPPERS:
        given = _text_config(given, kind)
        kind = str(given.get("model_type"))
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type={kind!r} is not supported here; supported are {tuple(FAMILIES)}, and the "
            f"text of {tuple(WRAPPERS)}"
        )
    check_sizes(given)
    return FAMILIES[kind].config.from_hf(given)


def _text_config(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    text = given.get("text_config")
    if text is None and kind.startswith(
        "qwen2"
    ):  # their folders have the fields of the text outside
        text = {**given, "model_type": f"{kind}_text"}
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"model_type={kind!r} in config.json needs an object text_config, and has {text!r}"
        )
    # The wrapper's field on ties decides, as in transformers.
    return {**text, "tie_word_embeddings": given.get("tie_word_embeddings", WRAPPERS[kind])}


def family_of(config: DecoderConfig) -> Family:
    return next(family for family in _ALL if family.config is type(config))
