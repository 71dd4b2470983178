"""Several small arrays of the host in one, since each array that a call takes is a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

_WORD_BYTES = 4


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneBuffer:
    """A pytree whose arrays lie one behind another; only the values are traced.

    Attributes:
      words: bits of the arrays, in the order of the leaves; a bool takes a word.
      structure: of the tree.
      layout: shape and dtype of each leaf.
    """

    words: Int32[Array, " words"]
    structure: Any = field(metadata={"static": True})
    layout: tuple[tuple[tuple[int, ...], str], ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> Self:
        """Return a buffer of NumPy arrays, which `tree` returns again.

        Raises:
          TypeError: an array has elements that are neither bools nor of four bytes.
        """
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in leaves]
        words: Any = np.concatenate(
            [_words(array) for array in arrays]
        )  # NumPy, until it is traced
        return cls(words, structure, tuple((each.shape, each.dtype.name) for each in arrays))

    def tree(self) -> Any:
        """Return the pytree; to be called where `words` is traced."""
        leaves, start = [], 0
        for shape, name in self.layout:
            size = int(np.prod(shape))
            words = self.words[start : start + size].reshape(shape)
            start += size
            is_bool = name == "bool"
            leaf = words != 0 if is_bool else jax.lax.bitcast_convert_type(words, jnp.dtype(name))
            leaves.append(leaf)
        return jax.tree.unflatten(self.structure, leaves)


def _words(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(np.int32).ravel()
    if array.dtype.itemsize != _WORD_BYTES:
        raise TypeError(f"an array of {array.dtype} does not fit a buffer of words; pass it alone")
    return np.ascontiguousarray(array).view(np.int32).ravel()


def packed(argument: Any) -> Any:
    """Return an argument's arrays in one, if they are several and all of the host."""
    leaves = jax.tree.leaves(argument)
    if len(leaves) < 2 or not all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        return argument
    return OneBuffer.of(argument)


def unpacked(argument: Any) -> Any:
    """Return the argument that `packed` was given."""
    return argument.tree() if isinstance(argument, OneBuffer) else argument
