"""Reads activations along finished answers, in one forward pass over prompt and answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32
from tqdm import tqdm

from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.decoder import Decoder
from jaxserve.predictor import Readings
from jaxserve.workload.answers import FinishedAnswer

# Tokens of a forward pass; sequences are padded to multiples of the smallest length.
_TOKENS_A_PASS = 2048
_LEAST_LENGTH = 64


def read_along(
    model: Decoder,
    answers: Sequence[FinishedAnswer],
    *,
    layer: int,
    interval: int,
    progress: bool = True,
) -> Readings:
    """Return activations after `layer` layers, at prompts' ends and every `interval` tokens.

    Raises InvalidConfigError if the model has fewer layers or a shorter context, or interval < 1.
    """
    config = model.config
    if not 1 <= layer <= config.num_layers:
        raise InvalidConfigError(f"layer={layer}; the model has layers 1 to {config.num_layers}")
    if interval < 1:
        raise InvalidConfigError(f"interval={interval}; give 1 token or more")
    longest = max((len(a.prompt) + len(a.output) for a in answers), default=0)
    if longest > config.max_position_embeddings:
        raise InvalidConfigError(
            f"an answer of {longest} tokens with its prompt is none of this model's, whose context "
            f"has {config.max_position_embeddings}; name the model that gave the answers"
        )
    graphdef, params = nnx.split(model)
    residual = jax.jit(partial(_residual, graphdef, layer))
    # The last token of an answer is never an input: no position after it has an activation.
    sequences = [np.asarray((*a.prompt, *a.output[:-1]), np.int32) for a in answers]
    places = [
        np.arange(len(a.prompt) - 1, len(tokens), interval)
        for a, tokens in zip(answers, sequences, strict=True)
    ]
    found: list[Float32[np.ndarray, "readings embed"]] = [
        np.zeros((0, config.hidden_size), np.float32)
    ] * len(answers)
    order = sorted(range(len(answers)), key=lambda i: len(sequences[i]), reverse=True)
    with tqdm(
        total=sum(map(len, sequences)),
        desc="reading activations",
        unit="tok",
        unit_scale=True,
        delay=2,
        leave=False,
        disable=not progress,
    ) as bar:
        while order:
            length = _padded(len(sequences[order[0]]))
            batch, order = order[: _rows(length)], order[_rows(length) :]
            tokens = np.zeros((_rows(length), length), np.int32)
            for row, i in enumerate(batch):
                tokens[row, : len(sequences[i])] = sequences[i]
            # In NumPy: on the device, each different number of places would compile again.
            hidden = np.asarray(residual(params, tokens)).astype(np.float32)
            for row, i in enumerate(batch):
                found[i] = hidden[row, places[i]]
                bar.update(len(sequences[i]))
    return Readings(
        activations=np.concatenate(found) if found else np.zeros((0, config.hidden_size)),
        answer=np.repeat(np.arange(len(answers)), [len(each) for each in places]),
        elapsed=np.concatenate(
            [at - (len(a.prompt) - 1) for a, at in zip(answers, places, strict=True)]
        ),
        lengths=np.asarray([len(a.output) for a in answers]),
    )


def _residual(
    graphdef: nnx.GraphDef, layer: int, params: nnx.State, tokens: Int32[Array, "sequences length"]
) -> Float[Array, "sequences length embed"]:
    return nnx.merge(graphdef, params).whole_residual(tokens, layer)


def _padded(length: int) -> int:
    """Return the next padded length; each is at most 1.5 times the previous one."""
    size = _LEAST_LENGTH
    while size < length:
        size += max(_LEAST_LENGTH, size // 4 // _LEAST_LENGTH * _LEAST_LENGTH)
    return size


def _rows(length: int) -> int:
    return max(1, _TOKENS_A_PASS // length)
