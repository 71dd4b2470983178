"""A family of models; each file of `families/` defines one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from jaxserve.models.config import DecoderConfig, Fields
from jaxserve.models.decoder import Decoder
from jaxserve.models.weights import Weight


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder, its configuration, and the places of its weights in Hugging Face checkpoints.

    Attributes:
      fields: the fields of a config.json that the family reads, by `model_type`.
      weights: returns, for a configuration, the tensors that fill each parameter, by the
        parameter's path with dots and without the layer's number.
      prefix: the beginning of most tensor names, or those of several members of the family;
        checkpoints of the bare model lack it.
      predicts_several: whether checkpoints may have layers after the last, which predict several
        tokens at a time and are not read.
      ignored: a pattern of tensor names that a checkpoint may have and the model does not need.
      unread: returns, for a configuration, names of other such tensors.
      constants: tensors of every layer that hold one number, which the model has as a constant.
    """

    fields: Mapping[str, Fields]
    config: type[DecoderConfig]
    decoder: type[Decoder]
    weights: Callable[[Any], Mapping[str, Weight]]
    prefix: str | tuple[str, ...] = "model."
    predicts_several: bool = False
    ignored: str = r".*\.rotary_emb\.inv_freq"
    unread: Callable[[Any], Collection[str]] = lambda config: ()
    constants: Mapping[str, float] = field(default_factory=dict)

    def ignored_of(self, config: DecoderConfig) -> re.Pattern[str]:
        """Return the pattern of all names that a checkpoint of this configuration need not have."""
        return re.compile("|".join([self.ignored, *map(re.escape, self.unread(config))]))

    def constants_of(self, config: DecoderConfig) -> dict[str, float]:
        """Return the constants of all layers by their tensors' names; a checkpoint may lack them.

        transformers does not: it computes with arbitrary numbers in place of a missing one.
        """
        layers = range(config.num_layers)
        return {
            name.format(layer=layer): value
            for layer in layers
            for name, value in self.constants.items()
        }
