"""What a family of models is: one file of `families/` makes one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.weights import Weight


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder, its configuration, and where its weights lie in Hugging Face checkpoints.

    Attributes:
      model_types: values of `model_type` in config.json that it serves.
      weights: of a configuration: path of each parameter, with dots and without the layer's
        number, to the tensors that fill it.
      prefix: that most tensor names begin with; checkpoints of the bare model lack it.
      ignored: matches names of tensors that may be there and hold nothing of use.
    """

    model_types: tuple[str, ...]
    config: type[DecoderConfig]
    decoder: type[Decoder]
    weights: Callable[[Any], Mapping[str, Weight]]
    prefix: str = "model."
    ignored: str = r".*\.rotary_emb\.inv_freq"
