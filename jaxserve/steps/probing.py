"""The protocol of a probe of remaining lengths, and the check that one fits a model."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxserve.core.errors import InvalidConfigError
from jaxserve.predictor import Refinement


class Probe(Protocol):
    """Predicts remaining lengths from activations; `predictor.LengthProbe` is one."""

    params: Any
    """Pytree of arrays, an argument of the steps."""

    @property
    def layer(self) -> int:
        """Return the number of layers before the place where the probe reads."""
        ...

    @property
    def width(self) -> int:
        """Return the width of the activations there."""
        ...

    @property
    def refinement(self) -> Refinement:
        """Return how its readings change a prediction."""
        ...

    def apply(
        self, params: Any, activations: Float[Array, "rows embed"], /
    ) -> Float32[Array, "rows buckets"]:
        """Return logits for activations of `width`."""
        ...


def check_probe(probe: Probe, model_config: Any) -> None:
    """Raise InvalidConfigError, before anything is compiled, if a probe cannot read a model."""
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
            f"the probe cannot be traced: {type(error).__name__}: {error}; pass a "
            "predictor.LengthProbe, or leave it out"
        ) from error
    if given != wanted:
        raise InvalidConfigError(
            f"the probe gives logits of shape {given} for one row, and its buckets need {wanted}"
        )
