"""What a runtime asks of a probe, and whether one fits a model."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxserve.core.errors import InvalidConfigError
from predictor import Refinement


class Probe(Protocol):
    """Reads remaining lengths off activations: a `predictor.LengthProbe`, or anything like it."""

    params: Any
    """A pytree of arrays, which the steps take as an argument."""

    @property
    def layer(self) -> int:
        """How many of the model's layers lie before the place where it reads."""
        ...

    @property
    def width(self) -> int:
        """Of the activations there."""
        ...

    @property
    def refinement(self) -> Refinement:
        """How what it reads changes what is believed."""
        ...

    def apply(self, params: Any, activations: jax.Array, /) -> jax.Array:
        """float32 logits [rows, buckets of remaining length] of activations [rows, width]."""
        ...


def check_probe(probe: Probe, model_config: Any) -> None:
    """Refuse a probe that cannot read this model, before anything is compiled.

    Raises:
      InvalidConfigError
    """
    if probe.width != model_config.hidden_size or not 1 <= probe.layer <= model_config.num_layers:
        raise InvalidConfigError(
            f"the probe reads activations of width {probe.width} behind layer {probe.layer}, and "
            f"the model has {model_config.num_layers} layers of width {model_config.hidden_size}; "
            "train one on this model (jaxserve predictor probe train)"
        )
    wanted = (1, probe.refinement.buckets.num)
    activations = jax.ShapeDtypeStruct((1, probe.width), jnp.float32)
    try:
        given = jax.eval_shape(probe.apply, probe.params, activations).shape
    except Exception as error:
        raise InvalidConfigError(
            f"the probe cannot be traced: {type(error).__name__}: {error}; give a "
            "predictor.LengthProbe, or leave it out"
        ) from error
    if given != wanted:
        raise InvalidConfigError(
            f"the probe gives logits of shape {given} for one row, and its buckets need {wanted}"
        )
