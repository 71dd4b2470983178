"""From Hugging Face tensors to the parameters of `Llama`, tensor by tensor, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.core.errors import CheckpointError
from jaxserve.models.config import LlamaConfig
from jaxserve.models.llama import LayerLayout, Llama
from jaxserve.models.source import WeightSource

Progress = Callable[[int, int], None]
Index = tuple[slice, ...]


@final
@dataclass(frozen=True)
class _Piece:
    """One checkpoint tensor and the part of a parameter that it fills.

    Attributes:
      name: in the checkpoint.
      shape: it must have there.
      target: which part of the parameter, one slice or integer a dimension.
      arrange: from the tensor as stored to the shape of that part.
    """

    name: str
    shape: tuple[int, ...]
    target: tuple[slice | int, ...]
    arrange: Callable[[np.ndarray], np.ndarray]


def load_params(
    abstract_state: nnx.State,
    config: LlamaConfig,
    source: WeightSource,
    shardings: nnx.State | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """The parameters of a `Llama`, read from a checkpoint straight into their arrays.

    One parameter (of one layer) at a time is on the host, never the whole model twice.

    Args:
      abstract_state: `nnx.state(nnx.eval_shape(lambda: Llama(config, ...)), nnx.Param)`.
      source: Hugging Face names, [out, in].
      shardings: as `sharding.state_shardings` gives; None for the default device.
      dtype: of the result; the abstract state's own by default.
      progress: called with (parameters done, parameters in all).

    Raises:
      CheckpointError: every missing, surplus and misshapen tensor together, before data is read;
        or a tensor whose data cannot be read.
    """
    flat = nnx.to_flat_state(abstract_state)
    plan = {path: list(_pieces(path, config)) for path, _ in flat}
    _check(plan, source, config)
    places = None if shardings is None else dict(nnx.to_flat_state(shardings))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loaded = []
    for done, (path, variable) in enumerate(flat):
        shape = variable.get_value().shape
        place = here if places is None else places[path].get_value()
        kind = np.dtype(dtype or variable.get_value().dtype)
        loaded.append((path, variable.replace(_array(plan[path], source, shape, kind, place))))
        if progress is not None:
            progress(done + 1, len(flat))
    return nnx.from_flat_state(loaded)


def random_params(
    config: LlamaConfig,
    seed: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    layer_layout: LayerLayout = "unrolled",
) -> nnx.State:
    """Random parameters for `load="random"`: normal with 1 / sqrt(fan-in), made on the device.

    Every matrix is drawn in `dtype`, so bfloat16 never has a float32 copy.
    """
    # Not under one jit: drawing array by array compiles once a shape, not once a parameter.
    model = Llama(config, rngs=nnx.Rngs(params=seed), dtype=dtype, layer_layout=layer_layout)
    return nnx.state(model, nnx.Param)


def abstract_llama(
    config: LlamaConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    layer_layout: LayerLayout = "unrolled",
) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph definition and abstract parameters; `nnx.merge` the former with loaded ones."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=None, dtype=dtype, layer_layout=layer_layout))
    return nnx.split(model)


def _array(
    pieces: list[_Piece],
    source: WeightSource,
    shape: tuple[int, ...],
    dtype: np.dtype,
    place: jax.sharding.Sharding,
) -> jax.Array:
    """The parameter; each shard's callback cuts its part out of one host copy."""
    if len(pieces) == 1 and not pieces[0].target:
        whole = np.ascontiguousarray(pieces[0].arrange(source.read(pieces[0].name)), dtype)
    else:
        whole = np.empty(shape, dtype)
        for piece in pieces:
            whole[piece.target] = piece.arrange(source.read(piece.name))
    return jax.make_array_from_callback(shape, place, lambda index: whole[index])


def _check(
    plan: Mapping[tuple[Any, ...], list[_Piece]], source: WeightSource, config: LlamaConfig
) -> None:
    found = source.shapes()
    wanted = {piece.name: piece.shape for pieces in plan.values() for piece in pieces}
    problems = [f"missing tensor {name} {wanted[name]}" for name in sorted(wanted.keys() - found)]
    problems += [
        f"tensor {name} has shape {tuple(found[name])}, the configuration says {shape}"
        for name, shape in sorted(wanted.items())
        if name in found and tuple(found[name]) != shape
    ]
    problems += [
        f"surplus tensor {name} {tuple(found[name])}"
        for name in sorted(found.keys() - wanted)
        if not _is_ignored(name, config)
    ]
    if problems:
        raise CheckpointError(
            source.where,
            problems,
            "config.json and the weights do not belong together, or the checkpoint is incomplete; "
            "fetch both again from the same place",
        )


def _is_ignored(name: str, config: LlamaConfig) -> bool:
    """Buffers that older checkpoints store, and the second copy of tied embeddings."""
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _pieces(path: tuple[Any, ...], config: LlamaConfig) -> Iterator[_Piece]:
    """What fills the parameter at `path` of a `Llama`'s state."""
    embed, vocab = config.hidden_size, config.vocab_size
    match path:
        case ("embedding",):
            yield _Piece("model.embed_tokens.weight", (vocab, embed), (), _as_is)
        case ("lm_head",):
            yield _Piece("lm_head.weight", (vocab, embed), (), np.transpose)
        case ("norm",):
            yield _Piece("model.norm.weight", (embed,), (), _as_is)
        case ("blocks", int(layer), str(name)):
            yield from _block_pieces(layer, (), name, config)
        case ("blocks", str(name)):
            for layer in range(config.num_layers):
                yield from _block_pieces(layer, (layer,), name, config)
        case _:
            raise AssertionError(f"no checkpoint tensor is known for the parameter {path}")


def _block_pieces(
    layer: int, at: tuple[int, ...], name: str, config: LlamaConfig
) -> Iterator[_Piece]:
    """What fills parameter `name` of one block; `at` is its place along a stacked layers axis."""
    embed, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    kv_heads, group, heads = config.num_kv_heads, config.group, config.num_heads
    every = slice(None)

    def piece(hf_name: str, shape: tuple[int, ...], target=(), arrange=_as_is) -> _Piece:
        return _Piece(f"model.layers.{layer}.{hf_name}", shape, (*at, *target), arrange)

    def split_heads(count: int) -> Callable[[np.ndarray], np.ndarray]:
        """[kv_heads * count * head_dim, ...in] -> [...in, kv_heads, count, head_dim]."""
        return lambda x: np.moveaxis(
            x.reshape(kv_heads, count, head_dim, *x.shape[1:]), (0, 1, 2), (-3, -2, -1)
        )

    match name:
        case "attention_norm":
            yield piece("input_layernorm.weight", (embed,))
        case "mlp_norm":
            yield piece("post_attention_layernorm.weight", (embed,))
        case "q_norm" | "k_norm":
            yield piece(f"self_attn.{name}.weight", (head_dim,))
        case "wqkv" | "bqkv":
            kind, rest = ("weight", (embed,)) if name == "wqkv" else ("bias", ())
            for letter, first, count in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
                yield piece(
                    f"self_attn.{letter}_proj.{kind}",
                    (kv_heads * count * head_dim, *rest),
                    (..., slice(first, first + count), every),
                    split_heads(count),
                )
        case "wo":
            yield piece(
                "self_attn.o_proj.weight",
                (embed, heads * head_dim),
                arrange=lambda x: x.T.reshape(kv_heads, group, head_dim, embed),
            )
        case "bo":
            yield piece("self_attn.o_proj.bias", (embed,))
        case "gate_up":
            for i, which in enumerate(("gate", "up")):
                yield piece(f"mlp.{which}_proj.weight", (mlp, embed), (every, i), np.transpose)
        case "bgate_up":
            for i, which in enumerate(("gate", "up")):
                yield piece(f"mlp.{which}_proj.bias", (mlp,), (i,))
        case "down":
            yield piece("mlp.down_proj.weight", (embed, mlp), arrange=np.transpose)
        case "bdown":
            yield piece("mlp.down_proj.bias", (embed,))
        case _:
            raise AssertionError(f"no checkpoint tensor is known for the block parameter {name}")


def _as_is(x: np.ndarray) -> np.ndarray:
    return x
