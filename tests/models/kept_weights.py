"""The numbers of a loaded model's weights, quantised and dense."""

from __future__ import annotations

import numpy as np
from flax import nnx

from jaxserve.models.linear import replace_weights_at
from jaxserve.models.quantised import QuantisedWeight, in_axes_last


def restored(loaded) -> dict[tuple, np.ndarray]:
    """Return the numbers of all quantised weights by path, with the in axes last."""
    model = nnx.merge(loaded.graphdef, loaded.params)
    return {
        path: np.asarray(module.dequantised())
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantisedWeight)
    }


def dense(loaded) -> dict[tuple, np.ndarray]:
    """Return the numbers of all dense weights by path, with the in axes last."""
    found = {}

    def note(path, weight, axes):
        found[path] = in_axes_last(np.asarray(weight[...]), axes)
        return weight

    replace_weights_at(nnx.merge(loaded.graphdef, loaded.params), note)
    return found
