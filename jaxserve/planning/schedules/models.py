"""Sizes of transformer models, layer by layer: those of ExeGPT's table 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of an encoder or decoder layer.

    Attributes:
      hidden_size: width of the activations between layers.
      attention_width: width of all query heads together.
      kv_width: width of all key heads together, and of all value heads.
      num_params: parameters that every token is multiplied with.
      num_join_params: parameters of the key and value projections of encoder outputs (cross
        attention), with which each input token is multiplied once.
      num_syncs: sums over tensor-parallel shards (section 2: two for an encoder layer, three for a
        decoder layer with cross attention).
    """

    hidden_size: int
    attention_width: int
    kv_width: int
    num_params: float
    num_join_params: float = 0.0
    num_syncs: int = 2


@final
@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes of a model that encodes inputs and decodes outputs.

    In a decoder-only model `encode_layer` equals `decode_layer`. Its encoding fills the KV cache
    and yields the first output token.

    Attributes:
      num_embedding_params: parameters of the vocabulary's embedding, and of the output head.
      bytes_each: bytes of a parameter, and of an element of the KV cache.
    """

    encode_layer: LayerShape
    num_encode_layers: int
    decode_layer: LayerShape
    num_decode_layers: int
    num_embedding_params: float
    bytes_each: int = 2
    is_decoder_only: bool = True

    @classmethod
    def decoder_only(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        ffn_size: int | None = None,
        group_size: int = 1,
        num_ffn_matrices: int = 2,
        bytes_each: int = 2,
    ) -> TransformerShape:
        """Return a decoder whose query heads have the total width `hidden_size`.

        Args:
          ffn_size: width of the feed-forward layer; four times `hidden_size` by default.
          group_size: query heads per KV head.
          num_ffn_matrices: 3 for gated feed-forward layers.
        """
        kv_width = hidden_size // group_size
        attention = 2 * hidden_size * (hidden_size + kv_width)
        ffn = num_ffn_matrices * hidden_size * (ffn_size or 4 * hidden_size)
        layer = LayerShape(
            hidden_size=hidden_size,
            attention_width=hidden_size,
            kv_width=kv_width,
            num_params=attention + ffn,
        )
        return cls(
            encode_layer=layer,
            num_encode_layers=num_layers,
            decode_layer=layer,
            num_decode_layers=num_layers,
            num_embedding_params=vocab_size * hidden_size,
            bytes_each=bytes_each,
        )

    @classmethod
    def encoder_decoder(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        attention_width: int,
        ffn_size: int,
        vocab_size: int,
        num_ffn_matrices: int = 2,
        bytes_each: int = 2,
    ) -> TransformerShape:
        """Return a model like T5, with `num_layers` encoder and as many decoder layers."""
        attention = 4 * hidden_size * attention_width
        ffn = num_ffn_matrices * hidden_size * ffn_size
        widths = {
            "hidden_size": hidden_size,
            "attention_width": attention_width,
            "kv_width": attention_width,
        }
        join = 2 * hidden_size * attention_width
        return cls(
            encode_layer=LayerShape(**widths, num_params=attention + ffn),
            num_encode_layers=num_layers,
            # Of decoded tokens, cross attention projects only queries and outputs.
            decode_layer=LayerShape(
                **widths, num_params=2 * attention - join + ffn, num_join_params=join, num_syncs=3
            ),
            num_decode_layers=num_layers,
            num_embedding_params=vocab_size * hidden_size,
            bytes_each=bytes_each,
            is_decoder_only=False,
        )

    @property
    def encode_layer_bytes(self) -> float:
        return self.encode_layer.num_params * self.bytes_each

    @property
    def decode_layer_bytes(self) -> float:
        layer = self.decode_layer
        return (layer.num_params + layer.num_join_params) * self.bytes_each

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token's keys and values in one decode layer."""
        return 2.0 * self.decode_layer.kv_width * self.bytes_each

    @property
    def num_params(self) -> float:
        """All parameters, with the embedding counted once."""
        layers = self.num_decode_layers * self.decode_layer_bytes
        if not self.is_decoder_only:
            layers += self.num_encode_layers * self.encode_layer_bytes
        return layers / self.bytes_each + self.num_embedding_params


def _gpt3(num_layers: int, hidden_size: int) -> TransformerShape:
    return TransformerShape.decoder_only(
        num_layers=num_layers, hidden_size=hidden_size, vocab_size=51200
    )


# Table 1. T5's other widths are those of its 11B checkpoint: 128 heads of 128, and a feed-forward
# width of 65,536; its 48 layers are 24 encoder and 24 decoder layers.
MODELS = {
    "T5-11B": TransformerShape.encoder_decoder(
        num_layers=24, hidden_size=1024, attention_width=16384, ffn_size=65536, vocab_size=32128
    ),
    "OPT-13B": TransformerShape.decoder_only(num_layers=40, hidden_size=5120, vocab_size=50272),
    "GPT3-39B": _gpt3(48, 8192),
    "GPT3-101B": _gpt3(80, 10240),
    "GPT3-175B": _gpt3(96, 12288),
    "GPT3-341B": _gpt3(120, 15360),
}
