"""Inputs of each layer beside the residual stream, made from the tokens (Gemma 3n and 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import DecoderConfig
from jaxserve.models.layers import ACTIVATIONS, scaled
from jaxserve.models.linear import Linear
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight


@final
class LayerInputs(nnx.Module):
    """The inputs of all layers: an embedding of the token, and a product of the residual stream.

    embedding    [vocab, layers * width]
    projection   [embed, layers * width]
    norm         [width]
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, vocab_size: int, width: int):
        self.num_layers, self.width = config.num_layers, width
        columns = config.num_layers * width
        self.embedding = new.weight((None, None), (vocab_size, columns), transposed=True)
        self.projection = new.weight(("embed", None), (config.hidden_size, columns))
        self.norm = RMSNorm(replace(config, hidden_size=width), new)

    def __call__(
        self,
        tokens: Int32[Array, " tokens"],
        x: Float[Array, "tokens embed"],  # the residual stream before the first layer
        adapter: Int32[Array, " tokens"] | None,
    ) -> list[Float[Array, "tokens width"]]:
        """Return the input of each layer."""
        shape = (len(x), self.num_layers, self.width)
        known = Linear(self.embedding).rows(tokens, adapter, x.dtype)
        known = known.reshape(shape) * jnp.asarray(self.width**0.5, x.dtype)
        seen = scaled(Linear(self.projection)(x, adapter), x.shape[1] ** -0.5)
        both = scaled(self.norm(seen.reshape(shape)) + known, 2**-0.5)
        return [both[:, layer] for layer in range(self.num_layers)]


@final
class LayerInput(nnx.Module):
    """The part of a layer that adds its input to the residual stream.

    gate  [embed, width]    of the residual stream, for the input
    out   [width, embed]
    norm  [embed]
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, width: int):
        self.activation = config.activation
        self.gate = new.weight(("embed", None), (config.hidden_size, width))
        self.out = new.weight((None, "embed"), (width, config.hidden_size))
        self.norm = RMSNorm(config, new)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        layer_input: Float[Array, "tokens width"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        """Return the addition to the residual stream `x`."""
        gated = ACTIVATIONS[self.activation](Linear(self.gate)(x, adapter)) * layer_input
        return self.norm(Linear(self.out)(gated, adapter))


def layer_input_weights(inputs: str, own: str, layer: str) -> dict[str, Weight]:
    """Return the weights of `LayerInputs` and `LayerInput` at these paths, by Gemma's names.

    `layer` begins the names of a layer's tensors.
    """
    return {
        f"{inputs}.embedding": Weight.of("model.embed_tokens_per_layer.weight", "v w"),
        f"{inputs}.projection": Weight.of("model.per_layer_model_projection.weight", "e w", "w e"),
        f"{inputs}.norm.scale": Weight.of("model.per_layer_projection_norm.weight"),
        f"{own}.gate": Weight.of(layer + "per_layer_input_gate.weight", "e w", "w e"),
        f"{own}.out": Weight.of(layer + "per_layer_projection.weight", "w e", "e w"),
        f"{own}.norm.scale": Weight.of(layer + "post_per_layer_input_norm.weight"),
    }
