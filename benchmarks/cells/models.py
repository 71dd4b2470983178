"""The thesis's applications with modules, and random weights for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from benchmarks.cells.applications import Sizes
from jaxserve.cells import Cell, Graph, Repeat
from jaxserve.cells.models import CellModel, Predicting
from jaxserve.cells.models.recurrent import Batch, Reader, token_inputs
from jaxserve.cells.models.seq2seq import read, token_cell
from jaxserve.cells.values import ValueSpec


@final
class Counted(nnx.Module):
    """A decoder step that also counts down the tokens that are left.

    As in the thesis (2.7.4), an answer has a given number of tokens of any value, and neither the
    host nor a policy knows the number before it ends.
    """

    def __init__(self, decoder: Predicting):
        self.decoder = decoder

    def __call__(
        self, token: Int32[Array, " batch"], left: Int32[Array, " batch"], **state: Batch
    ) -> dict[str, jax.Array]:
        return {**self.decoder(token, **state), "left": left - 1}


def counted_seq2seq(
    encoder: Reader, decoder: Predicting, batch_sizes: Mapping[str, Sequence[int]]
) -> CellModel:
    """Return a model whose inputs are `CellRequest`s, and whose results have the tokens."""
    reader = decoder.embedded
    encode = token_cell(encoder, name="encoder", batch_sizes=batch_sizes["encoder"])
    inputs = {**token_inputs(reader), "left": ValueSpec((), jnp.dtype(jnp.int32))}
    once = Cell(Counted(decoder), inputs, name="decoder", priority=1, takes_rows=True)
    decode = Repeat(
        once,
        {name: name for name in inputs},
        _is_last,
        emits=["token"],
        name="decoder",
        batch_sizes=batch_sizes["decoder"],
    )

    def unfold(request: Any) -> Graph:
        node = read(encode, encoder, request.tokens)
        states = {name: node[name] for name in reader.state}
        answer = decode(
            token=0, left=request.num_output_tokens, max_steps=request.max_steps, **states
        )
        return Graph(outputs={"token": answer.steps("token")})

    return CellModel((encode, decode), unfold)


def _is_last(outputs: Mapping[str, jax.Array]) -> jax.Array:
    return outputs["left"] == 0


def random_weights(application: str, sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return float32 weights by name, in the layout of our modules: matrices are [in, out]."""
    random = np.random.default_rng(seed)
    h, vocab = sizes.hidden_size, sizes.vocab_size
    limit = h**-0.5

    def uniform(*shape: int) -> np.ndarray:
        return random.uniform(-limit, limit, shape).astype(np.float32)

    def table() -> np.ndarray:
        return random.normal(size=(vocab, h)).astype(np.float32)

    def lstm(name: str) -> dict[str, np.ndarray]:
        return {
            f"{name}.table": table(),
            f"{name}.kernel": uniform(2 * h, 4 * h),
            f"{name}.bias": uniform(4 * h),
        }

    if application == "lstm":
        return lstm("encoder")
    if application == "seq2seq":
        project = {"project.kernel": uniform(h, vocab), "project.bias": uniform(vocab)}
        return {**lstm("encoder"), **lstm("decoder"), **project}
    return {
        **{"leaf.table": table(), "leaf.kernel": uniform(h, 3 * h), "leaf.bias": uniform(3 * h)},
        **{"internal.kernel": uniform(2 * h, 5 * h), "internal.bias": uniform(5 * h)},
    }


def model_from(
    tensors: Mapping[str, np.ndarray],
    batch_sizes: Mapping[str, Sequence[int]],
    *,
    folds: bool,
    returns: Sequence[str] = ("h", "c"),
) -> Any:
    """Return our model with these weights; its inputs are `CellRequest`s.

    Args:
      folds: whether products with embeddings are computed now, see `models.folded`.
      returns: the states that results of the LSTM and of trees have.
    """
    from jaxserve.cells import models
    from jaxserve.cells.models import torch_weights

    def torch_like(name: str) -> dict[str, np.ndarray]:
        kernel, bias = tensors[f"{name}.kernel"].T, tensors[f"{name}.bias"]
        h = kernel.shape[1] // 2
        return {
            "weight": tensors[f"{name}.table"],
            **{"weight_ih": kernel[:, :h], "weight_hh": kernel[:, h:]},
            **{"bias_ih": bias, "bias_hh": np.zeros_like(bias)},
        }

    def fold(module: Any) -> Any:
        return models.folded(module) if folds else module

    def embedded(name: str) -> Any:
        given = torch_like(name)
        step = torch_weights.lstm_from_torch(given)
        return fold(torch_weights.embedded_from_torch(step, given, ""))

    if "leaf.kernel" in tensors:
        given = {"embedding.weight": tensors["leaf.table"]}
        for name in ("leaf", "internal"):
            given |= {f"{name}.weight": tensors[f"{name}.kernel"].T}
            given |= {f"{name}.bias": tensors[f"{name}.bias"]}
        leaf, internal = torch_weights.tree_lstm_from_torch(given)
        tree = models.tree_lstm_model(
            fold(leaf),
            internal,
            leaf_batch_sizes=batch_sizes["leaf"],
            internal_batch_sizes=batch_sizes["internal"],
            returns=returns,
        )
        return models.CellModel(tree.cells, lambda request: tree.unfold(request.tree))
    encoder = embedded("encoder")
    if "decoder.kernel" not in tensors:
        lstm = models.sequence_model(
            encoder, name="lstm", batch_sizes=batch_sizes["lstm"], returns=returns
        )
        return models.CellModel(lstm.cells, lambda request: lstm.unfold(request.tokens))
    project = {"weight": tensors["project.kernel"].T, "bias": tensors["project.bias"]}
    decoder = torch_weights.predicting_from_torch(embedded("decoder"), project, "")
    return counted_seq2seq(encoder, decoder, batch_sizes)
