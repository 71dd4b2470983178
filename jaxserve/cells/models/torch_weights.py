"""Modules from the tensors of PyTorch modules, as `safetensors.numpy.load_file` reads them.

PyTorch is not needed. `tensors` have the names of a `state_dict`. PyTorch's weights are [out, in],
and are transposed here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, final

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.cells.models.recurrent import (
    GRU,
    LSTM,
    Embedded,
    Predicting,
    Reader,
    RecurrentStep,
    Stacked,
)
from jaxserve.cells.models.tree_lstm import Internal, Leaf
from jaxserve.core.errors import CheckpointError

_Module = TypeVar("_Module", bound=nnx.Module)
_Layer = TypeVar("_Layer", LSTM, GRU)
_Tensors = Mapping[str, np.ndarray]


def lstm_from_torch(tensors: _Tensors, prefix: str = "") -> LSTM | Stacked:
    """Return the step of a `torch.nn.LSTMCell` or a `torch.nn.LSTM`.

    Args:
      prefix: of its names in `tensors`, with the dot.

    Returns:
      An `LSTM`, or a `Stacked` of several layers.

    Raises:
      CheckpointError: tensors are missing or have wrong shapes, or a layer reads backwards; all
        problems together.
    """
    layers = _layers(_Reader(tensors, prefix), num_gates=4)
    return _one_or_stacked([_lstm(*layer) for layer in layers])


def gru_from_torch(tensors: _Tensors, prefix: str = "") -> GRU | Stacked:
    """Return the step of a `torch.nn.GRUCell` or a `torch.nn.GRU`; see `lstm_from_torch`."""
    layers = _layers(_Reader(tensors, prefix), num_gates=3)
    return _one_or_stacked([_gru(*layer) for layer in layers])


def embedded_from_torch(step: RecurrentStep, tensors: _Tensors, prefix: str) -> Embedded:
    """Return a step after the `torch.nn.Embedding` under the prefix; see `lstm_from_torch`."""
    reader = _Reader(tensors, prefix)
    table = reader.read((None, step.input_size), "weight")
    reader.check()
    return _filled(lambda rngs: Embedded(step, table.shape[0], rngs=rngs), table=table)


def predicting_from_torch(embedded: Reader, tensors: _Tensors, prefix: str) -> Predicting:
    """Return a decoder's step before the `torch.nn.Linear` projection under the prefix.

    Raises:
      CheckpointError: see `lstm_from_torch`.
    """
    reader = _Reader(tensors, prefix)
    size = embedded.vocab_size
    weight = reader.read((size, embedded.hidden_size), "weight")
    bias = reader.read((size,), "bias")
    reader.check()
    return _filled(lambda rngs: Predicting(embedded, rngs=rngs), kernel=weight.T, bias=bias)


def tree_lstm_from_torch(tensors: _Tensors, prefix: str = "") -> tuple[Leaf, Internal]:
    """Return the cells of a TreeLSTM, for which PyTorch has no module.

    Under the prefix there are the `torch.nn.Embedding` "embedding" and two `torch.nn.Linear`, with
    the gates in the orders of `Leaf` and `Internal`: "leaf" from the embedding to 3 gates, and
    "internal" from both h to 5 gates.

    Raises:
      CheckpointError: see `lstm_from_torch`.
    """
    reader = _Reader(tensors, prefix)
    table = reader.read((None, None), "embedding.weight")
    of_leaf = reader.read((None, table.shape[1]), "leaf.weight")
    (vocab_size, input_size), hidden_size = table.shape, of_leaf.shape[0] // 3
    of_pair = reader.read((5 * hidden_size, 2 * hidden_size), "internal.weight")
    leaf_bias = reader.read((3 * hidden_size,), "leaf.bias")
    internal_bias = reader.read((5 * hidden_size,), "internal.bias")
    reader.check()
    leaf = _filled(
        lambda rngs: Leaf(vocab_size, input_size, hidden_size, rngs=rngs),
        table=table,
        kernel=of_leaf.T,
        bias=leaf_bias,
    )
    internal = _filled(
        lambda rngs: Internal(hidden_size, rngs=rngs), kernel=of_pair.T, bias=internal_bias
    )
    return leaf, internal


@final
class _Reader:
    """Float32 tensors by name, and the problems with them. Missing tensors read as zeros."""

    def __init__(self, tensors: _Tensors, prefix: str):
        self._tensors = tensors
        self._prefix = prefix
        self._problems: list[str] = []

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def refuse(self, name: str, why: str) -> None:
        if self.has(name):
            self._problems.append(f"{self._prefix + name} {why}")

    def check(self) -> None:
        if self._problems:
            raise CheckpointError(
                f"of {len(self._tensors)} tensors",
                list(dict.fromkeys(self._problems)),
                "pass the state_dict of a module with one direction, biases and no projection",
            )

    def read(self, shape: Sequence[int | None], *names: str) -> np.ndarray:
        """Return the tensor under the first of the names that there is; None is any size."""
        zeros = np.zeros([0 if size is None else size for size in shape], np.float32)
        found = [self._prefix + name for name in names if self._prefix + name in self._tensors]
        if not found:
            self._problems.append(f"{self._prefix + names[0]} is missing")
            return zeros
        value = np.asarray(self._tensors[found[0]], np.float32)
        fits = value.ndim == len(shape) and all(
            size in (None, given) for size, given in zip(shape, value.shape, strict=True)
        )
        if fits:
            return value
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        self._problems.append(f"{found[0]} has the shape {value.shape} instead of ({wanted})")
        return zeros


def _layers(reader: _Reader, num_gates: int) -> list[tuple[np.ndarray, ...]]:
    """Return the two weights and the two biases of each layer, from the first to the last."""
    found = []
    while not found or reader.has(f"weight_hh_l{len(found)}"):
        number, below = len(found), found[-1][1].shape[1] if found else None
        w_h, w_x, b_x, b_h = (
            (f"{name}_l{number}", *([name] if number == 0 else []))
            for name in ("weight_hh", "weight_ih", "bias_ih", "bias_hh")
        )
        hidden_size = reader.read((None, below), *w_h).shape[1]
        rows = num_gates * hidden_size
        found.append(
            (
                reader.read((rows, below), *w_x),
                # Other numbers of rows belong to another kind of step, or to a projected network.
                reader.read((rows, hidden_size), *w_h),
                reader.read((rows,), *b_x),
                reader.read((rows,), *b_h),
            )
        )
        reader.refuse(f"weight_hh_l{number}_reverse", "is of a layer that reads backwards")
    reader.check()
    return found


def _one_or_stacked(layers: list[_Layer]) -> _Layer | Stacked:
    return layers[0] if len(layers) == 1 else Stacked(layers)


def _lstm(w_x: np.ndarray, w_h: np.ndarray, b_x: np.ndarray, b_h: np.ndarray) -> LSTM:
    return _filled(
        lambda rngs: LSTM(w_x.shape[1], w_h.shape[1], rngs=rngs),
        kernel=np.concatenate([w_x, w_h], axis=1).T,
        bias=b_x + b_h,
    )


def _gru(w_x: np.ndarray, w_h: np.ndarray, b_x: np.ndarray, b_h: np.ndarray) -> GRU:
    return _filled(
        lambda rngs: GRU(w_x.shape[1], w_h.shape[1], rngs=rngs),
        kernel_x=w_x.T,
        kernel_h=w_h.T,
        bias_x=b_x,
        bias_h=b_h,
    )


def _filled(make: Callable[[nnx.Rngs], _Module], **values: np.ndarray) -> _Module:
    module = make(nnx.Rngs(0))
    nnx.update(module, nnx.State({name: jnp.asarray(value) for name, value in values.items()}))
    return module
