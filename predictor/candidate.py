"""A copy of a predictor's parameters that is trained and compared with the serving ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, Int32

from predictor.calibration import Calibration
from predictor.data import padded, width_of
from predictor.evaluation import evaluate
from predictor.predictor import LengthPredictor, Params
from predictor.replay import Observation
from predictor.training import adamw


@final
class Candidate:
    """Parameters under training. Every computation has one shape, so that it compiles once.

    Attributes:
      params: at first the parameters that serve.
    """

    def __init__(self, predictor: LengthPredictor, *, batch_size: int, learning_rate: float):
        self._predictor = predictor
        self._batch_size = batch_size
        self._width = width_of(predictor.encoder.max_tokens)
        self._optimizer = adamw(learning_rate)
        self._update, self._apply = jax.jit(self._updated), jax.jit(predictor.apply)
        self.restart()

    def restart(self) -> None:
        """Start over from the parameters that serve."""
        self.params = self._predictor.params
        self._moments = self._optimizer.init(self.params)

    def learn(self, batch: Sequence[Observation]) -> float:
        """Take one step on a whole batch and return its mean cross-entropy before the step."""
        labels = np.asarray([one.bucket for one in batch], np.int32)
        arrays = self._padded([one.tokens for one in batch])
        self.params, self._moments, loss = self._update(self.params, self._moments, *arrays, labels)
        return float(loss)

    def logits(
        self, tokens: Sequence[np.ndarray], params: Params
    ) -> Float32[np.ndarray, "texts buckets"]:
        """Return logits, computed with `params`."""
        rows = [np.zeros((0, self._predictor.buckets.num), np.float32)]
        for start in range(0, len(tokens), self._batch_size):
            some = tokens[start : start + self._batch_size]
            rows.append(np.asarray(self._apply(params, *self._padded(some)))[: len(some)])
        return np.concatenate(rows)

    def judged(
        self, params: Params, kept: Sequence[Observation]
    ) -> tuple[float, Calibration | None]:
        """Calibrate `params` on held-out observations and return their loss and calibration.

        The loss is the mean cross-entropy after calibration. Without observations, or with logits
        that are not finite, the result is (infinity, None).
        """
        logits = self.logits([one.tokens for one in kept], params)
        if not kept or not np.isfinite(logits).all():
            return float("inf"), None
        buckets, lengths = self._predictor.buckets, np.asarray([one.length for one in kept])
        calibration = Calibration.fit(buckets, logits, lengths)
        figures = evaluate(buckets, logits / calibration.temperature, lengths)
        return figures.cross_entropy, calibration

    def warm_up(self) -> tuple[float, float]:
        """Compile everything, and return the seconds of a step and of a batch's logits."""
        text = np.zeros(self._width, np.int32)
        arrays, labels = self._padded([text]), np.zeros(self._batch_size, np.int32)
        params, moments = self.params, self._moments
        step_s = logits_s = 0.0
        for _ in range(3):  # the first compiles; the second may too, on arrays that a step returned
            begin_s = time.perf_counter()
            params, moments, _ = jax.block_until_ready(
                self._update(params, moments, *arrays, labels)
            )
            middle_s = time.perf_counter()
            self.logits([text] * self._batch_size, params)
            step_s, logits_s = middle_s - begin_s, time.perf_counter() - middle_s
        return step_s, logits_s

    def leaves(self) -> list[Any]:
        """Return all arrays of the state, for `restore`."""
        return jax.tree.leaves((self.params, self._moments))

    def restore(self, leaves: Sequence[Any]) -> None:
        """Set the state to the arrays that `leaves` returned."""
        structure = jax.tree.structure((self.params, self._moments))
        self.params, self._moments = jax.tree.unflatten(structure, leaves)

    def _padded(
        self, tokens: Sequence[np.ndarray]
    ) -> tuple[Int32[np.ndarray, "rows width"], Bool[np.ndarray, "rows width"]]:
        return padded(tokens, self._batch_size, self._width)

    def _updated(
        self,
        params: Params,
        moments: Any,
        tokens: Int32[Array, "rows width"],
        mask: Bool[Array, "rows width"],
        labels: Int32[Array, " rows"],
    ) -> tuple[Params, Any, Float32[Array, ""]]:
        def loss_of(params: Params) -> jax.Array:
            logits = self._predictor.apply(params, tokens, mask)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss  # pyrefly: ignore[bad-return]
