"""Layers of several kinds in one decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.layers import Block, GatedMLP
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.routing import ExpertsConfig
from tests.models.serving import Server

SIZES = dict(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=36,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
)


class MLPBlock(Block):
    """A layer that is only an MLP."""

    norm_class = RMSNorm
    mlp_class = GatedMLP

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, which makes attention
        self.mlp_norm = RMSNorm(config, new)
        self.mlp = GatedMLP(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        return self.mlp(x, context, norm=self.mlp_norm, residual=x)


class Mixed(Decoder):
    def _block_class(self, layer: int) -> type[Block]:
        return MLPBlock if self.config.layer_kinds[layer] == "mlp" else Block


@pytest.mark.release
def test_a_layer_without_memory_has_no_place_in_the_cache():
    """Through the cache, logits are those of the whole sequence; the cache has the other layers."""
    config = LlamaConfig(**SIZES, layer_kinds=("attention", "mlp", "attention"))
    model = Mixed(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 50, 20)
    graphdef, params = nnx.split(model)
    server = Server(graphdef, params, config)
    got = [*server.step([(0, tokens[:11])]), *server.step([(0, tokens[11:19])])]
    got += server.decode({0: tokens[19]})
    whole = jnp.asarray(tokens)[None]
    wanted = jax.jit(lambda params: nnx.merge(graphdef, params).whole_logits(whole))(params)
    np.testing.assert_allclose(np.concatenate(got), wanted[0], atol=1e-4)
    assert config.num_attention_layers == 2
    assert config.places == (0, 0, 1)


def test_a_part_has_the_kinds_of_its_layers():
    """Kinds of layers and of MLPs are cut like windows, and layers that differ are not scanned."""
    config = LlamaConfig(
        **SIZES,
        layer_kinds=("attention", "mlp", "attention"),
        mlp_kinds=("dense", "experts", "experts"),
        experts=ExpertsConfig(num=8, size=6, per_token=2, shared_size=12),
    )
    assert config.part(range(1, 3)).layer_kinds == ("mlp", "attention")
    assert config.part(range(1, 3)).mlp_kinds == ("experts", "experts")
    assert not config.is_uniform
    with pytest.raises(UnsupportedModelError, match="cannot be scanned"):
        Mixed(config, rngs=None, layer_layout="scanned")


@pytest.mark.parametrize(
    ("kinds", "shared", "parts"),
    [
        (("dense",) * 3, 12, 36),
        (("experts",) * 3, None, 8),
        (("dense", "experts", "experts"), None, 4),
        (("experts",) * 3, 6, 2),
    ],
)
def test_a_mesh_divides_all_mlps(kinds, shared, parts):
    """The number of parts divides the inner sizes and the number of experts that layers have."""
    experts = ExpertsConfig(num=8, size=6, per_token=2, shared_size=shared)
    assert LlamaConfig(**SIZES, mlp_kinds=kinds, experts=experts).num_mlp_parts == parts


def test_experts_without_sizes_are_refused():
    """The error names what is missing."""
    with pytest.raises(UnsupportedModelError, match="experts is missing"):
        LlamaConfig(**SIZES, mlp_kinds=("experts",) * 3)
    with pytest.raises(UnsupportedModelError, match="2 kinds of MLPs for 3 layers"):
        LlamaConfig(**SIZES, mlp_kinds=("dense",) * 2)
