"""Training of a probe on activations along finished answers, and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int
from tqdm import tqdm

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.calibration import Calibration
from jaxserve.predictor.distribution import LengthDistributions
from jaxserve.predictor.probe import LengthProbe, ProbeConfig, ProbeHead
from jaxserve.predictor.refinement import Refinement
from jaxserve.predictor.training import TrainingConfig, TrainingHistory, adamw, wait_for_earlier

TRAINING = TrainingConfig(batch_size=256, learning_rate=1e-3, num_epochs=30, patience=4)
# The grid of exponents that are tried on held-out readings.
_BELIEF_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_READING_WEIGHTS = (0.2, 0.4, 0.6, 0.8, 1.0)
# Standard deviations are raised to at least this share of their mean.
_LEAST_SCALE = 1e-3


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Readings:
    """Activations along several answers, at the end of each prompt and at intervals after it.

    Attributes:
      answer: the index of each reading's answer, sorted.
      elapsed: tokens generated before the reading; 0 at the prompt's end, and increasing within an
        answer.
      lengths: output length of each answer in tokens.
    """

    activations: Float32[np.ndarray, "readings width"]
    answer: Int[np.ndarray, " readings"]
    elapsed: Int[np.ndarray, " readings"]
    lengths: Int[np.ndarray, " answers"]

    @property
    def remaining(self) -> Int[np.ndarray, " readings"]:
        """Remaining length of each reading's answer in tokens, 1 or more."""
        return self.lengths[self.answer] - self.elapsed


def train_probe(
    config: ProbeConfig,
    buckets: LengthBuckets,
    learned: Readings,
    held_out: Readings,
    training: TrainingConfig = TRAINING,
    *,
    interval: int = 16,
    progress: bool = True,
) -> tuple[LengthProbe, TrainingHistory]:
    """Train until the loss on `held_out` stops falling; then fit calibration and exponents to it.

    Args:
      buckets: buckets of remaining length.
      interval: tokens between readings, in this data and later in the runtime.

    Raises:
      ValueError: a set is empty, or its activations have a wrong width.
    """
    for part in (learned, held_out):
        if part.activations.shape[1:] != (config.width,) or not len(part.activations):
            raise ValueError(
                f"activations{part.activations.shape} are not allowed; pass [readings, "
                f"{config.width}] with at least one reading to learn from and one held out"
            )
    head = _standardising(config, buckets.num, learned.activations, training.seed)
    history = _fit(head, buckets, learned, held_out, training, progress)
    counts = np.bincount(buckets.bucket_of(learned.lengths), minlength=buckets.num)
    marginal = (counts + 1.0) / (counts.sum() + buckets.num)
    probe = LengthProbe(config, head, Refinement(buckets=buckets, marginal=marginal))
    logits = probe.logits(held_out.activations)
    calibration = Calibration.fit(buckets, logits, held_out.remaining)
    refinement = replace(probe.refinement, temperature=calibration.temperature, interval=interval)
    refinement = weighed(refinement, held_out, logits)
    return LengthProbe(config, head, refinement, calibration), history


def weighed(
    refinement: Refinement, held_out: Readings, logits: Float[np.ndarray, "readings buckets"]
) -> Refinement:
    """Return `refinement` with the exponents of the lowest cross-entropy on held-out answers."""
    right = refinement.buckets.bucket_of(held_out.remaining)
    first = refinement.first(None, len(held_out.lengths))

    def loss(candidate: Refinement) -> float:
        after = candidate.along(logits, held_out.answer, held_out.elapsed, first)
        return float(-np.log(np.maximum(after[np.arange(len(right)), right], 1e-12)).mean())

    candidates = [
        replace(refinement, belief_weight=belief, reading_weight=reading)
        for belief in _BELIEF_WEIGHTS
        for reading in _READING_WEIGHTS
    ]
    return min(candidates, key=loss)


def _standardising(
    config: ProbeConfig,
    num_buckets: int,
    activations: Float[np.ndarray, "readings width"],
    seed: int,
) -> ProbeHead:
    head = ProbeHead(config, num_buckets, rngs=nnx.Rngs(seed))
    mean = activations.mean(0, dtype=np.float64)
    deviation = activations.std(0, dtype=np.float64)
    head.mean[...] = jnp.asarray(mean, jnp.float32)
    least = max(_LEAST_SCALE * float(deviation.mean()), 1e-12)
    head.scale[...] = jnp.asarray(1.0 / np.maximum(deviation, least), jnp.float32)
    return head


def _fit(
    head: ProbeHead,
    buckets: LengthBuckets,
    learned: Readings,
    held_out: Readings,
    config: TrainingConfig,
    progress: bool,
) -> TrainingHistory:
    labels = buckets.bucket_of(learned.remaining).astype(np.int32)
    judged = jnp.asarray(held_out.activations), jnp.asarray(buckets.bucket_of(held_out.remaining))
    num, size = len(labels), config.batch_size
    num_steps = -(-num // size) * config.num_epochs
    schedule = optax.cosine_decay_schedule(config.learning_rate, num_steps)
    optimizer = nnx.Optimizer(
        head,
        adamw(schedule, clip_norm=config.clip_norm, weight_decay=config.weight_decay),
        wrt=nnx.Param,
    )
    history, best = TrainingHistory(), nnx.to_pure_dict(nnx.state(head, nnx.Param))
    bar = tqdm(
        total=num_steps, desc="training", unit="step", delay=2, leave=False, disable=not progress
    )
    with bar:
        for epoch in range(config.num_epochs):
            order = np.random.default_rng((config.seed, epoch)).permutation(num)
            losses = []
            for start in range(0, num, size):
                # The last batch is filled from the first, so that one shape is compiled.
                batch = np.take(order, range(start, start + size), mode="wrap")
                some = jnp.asarray(learned.activations[batch]), jnp.asarray(labels[batch])
                losses.append(_step(head, optimizer, *some))
                wait_for_earlier(losses)
                bar.update()
            history.losses.append(float(np.mean([float(loss) for loss in losses])))
            history.held_out_losses.append(float(_loss(head, *judged)))
            bar.set_postfix(held_out=f"{history.held_out_losses[-1]:.3f}")
            if history.best_epoch == epoch:
                best = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(head, nnx.Param)))
            elif epoch - history.best_epoch >= config.patience:
                break
    state = nnx.state(head, nnx.Param)
    nnx.replace_by_pure_dict(state, best)
    nnx.update(head, state)
    return history


@nnx.jit
def _step(
    head: ProbeHead,
    optimizer: nnx.Optimizer,
    activations: Float[Array, "rows width"],
    labels: Int[Array, " rows"],
) -> Float32[Array, ""]:
    loss, gradients = nnx.value_and_grad(_loss)(head, activations, labels)
    optimizer.update(head, gradients)
    return loss


def _loss(
    head: ProbeHead, activations: Float[Array, "rows width"], labels: Int[Array, " rows"]
) -> Float32[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(head(activations), labels).mean()


@final
@dataclass(frozen=True, kw_only=True)
class RemainingFigures:
    """One method's metrics, over the answers that were longer than `elapsed` tokens (None for all).

    Attributes:
      num: number of readings.
      error_tokens: mean absolute difference between expected and true remaining length.
      accuracy: share of readings whose likeliest bucket of remaining length is the right one.
      cross_entropy: mean, in nats.
    """

    name: str
    elapsed: int | None
    num: int
    error_tokens: float
    accuracy: float
    cross_entropy: float


def compare_remaining(
    probe: LengthProbe,
    test: Readings,
    elapsed: Sequence[int],
    predicted: Mapping[str, LengthDistributions] | None = None,
) -> list[RemainingFigures]:
    """Return the metrics of survival alone, of single readings, and of refined predictions.

    Args:
      test: readings along answers that the probe was not trained on.
      elapsed: numbers of generated tokens to report; a number without readings is omitted.
      predicted: name -> predicted output lengths of the test's answers, such as an encoder's. Each
        is evaluated with survival alone and refined by readings; the marginal always is.
    """
    refinement, logits = probe.refinement, probe.logits(test.activations)
    marginal = LengthDistributions(refinement.buckets, refinement.marginal[None])
    methods = {"single readings": _Prediction.of(probe.predict(test.activations))}
    for name, lengths in {"marginal": marginal, **(predicted or {})}.items():
        first = np.broadcast_to(lengths.probabilities, (len(test.lengths), lengths.buckets.num))
        after = LengthDistributions(lengths.buckets, first[test.answer])
        methods[f"{name}, survival"] = _Prediction(
            after.remaining(test.elapsed, refinement.buckets),
            after.expected_remaining(test.elapsed),
        )
        prior = refinement.first(LengthDistributions(lengths.buckets, first))
        refined = refinement.along(logits, test.answer, test.elapsed, prior)
        methods[f"{name}, refined"] = _Prediction.of(
            LengthDistributions(refinement.buckets, refined)
        )
    return [
        figures
        for name, prediction in methods.items()
        for at in (*elapsed, None)
        if (figures := _figures(name, refinement.buckets, prediction, test, at)) is not None
    ]


@final
@dataclass(frozen=True, eq=False)
class _Prediction:
    probabilities: Float[np.ndarray, "readings buckets"]
    expected: Float[np.ndarray, " readings"]

    @classmethod
    def of(cls, lengths: LengthDistributions) -> _Prediction:
        return cls(lengths.probabilities, lengths.expected_remaining())


def _figures(
    name: str, buckets: LengthBuckets, prediction: _Prediction, test: Readings, at: int | None
) -> RemainingFigures | None:
    is_wanted = np.full(len(test.elapsed), True) if at is None else test.elapsed == at
    rows = np.flatnonzero(is_wanted)
    if not len(rows):
        return None
    remaining = np.minimum(test.remaining[rows], buckets.max_length)
    right = buckets.bucket_of(remaining)
    probabilities = prediction.probabilities[rows]
    of_right = np.maximum(probabilities[np.arange(len(rows)), right], 1e-12)
    return RemainingFigures(
        name=name,
        elapsed=at,
        num=len(rows),
        error_tokens=float(np.abs(prediction.expected[rows] - remaining).mean()),
        accuracy=float((probabilities.argmax(1) == right).mean()),
        cross_entropy=float(-np.log(of_right).mean()),
    )
