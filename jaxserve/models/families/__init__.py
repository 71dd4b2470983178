"""All families of models, one in each file; docs/adding_a_model.md says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, check_sizes
from jaxserve.models.families import bamba, gemma, gpt2, gpt_neox, gptj, llama, mamba2, moe, opt, t5
from jaxserve.models.family import Family

_ALL = tuple(m.FAMILY for m in (llama, gpt2, opt, gptj, gpt_neox, gemma, moe, t5, mamba2, bamba))
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {kind: family for family in _ALL for kind in family.fields}
)


def config_from_hf(given: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a model of any family, from config.json as a dictionary.

    Raises:
      UnsupportedModelError: naming what is given and what is supported.
    """
    kind = str(given.get("model_type"))
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type={kind!r} is not supported here; supported are {tuple(FAMILIES)}"
        )
    check_sizes(given)
    return FAMILIES[kind].config.from_hf(given)


def family_of(config: DecoderConfig) -> Family:
    """Return the family that a configuration belongs to."""
    return next(family for family in _ALL if family.config is type(config))
