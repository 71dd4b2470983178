"""Fine-tuning of the predictor with optax."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int
from tqdm import tqdm

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.data import Example, padded, shuffled_batches
from jaxserve.predictor.encoder import LengthClassifier
from jaxserve.predictor.predictor import LengthPredictor


@final
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings of fine-tuning.

    Attributes:
      warmup: share of all steps in which the learning rate rises; then it falls to 0 (cosine).
      weigh_classes: weigh examples in inverse proportion to the frequency of their bucket.
      dtype: type of the encoder's computation in training steps, "float32" or "bfloat16"; by
        default bfloat16 on GPUs and float32 elsewhere. Parameters, optimizer state and evaluation
        are float32.
      patience: training ends after this number of epochs without a better held-out loss.
    """

    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip_norm: float = 1.0
    num_epochs: int = 4
    patience: int = 1
    weigh_classes: bool = False
    dtype: str | None = None
    seed: int = 0

    @property
    def computed_in(self) -> str:
        return self.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_epochs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; pass 1 or more")
        if not 0.0 <= self.warmup < 1.0 or self.learning_rate <= 0.0:
            raise ValueError(
                f"warmup={self.warmup} and learning_rate={self.learning_rate} are not allowed; "
                "pass a share from 0 to under 1, and a rate over 0"
            )
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} is not allowed; pass 'float32' or 'bfloat16'")


@final
@dataclass
class TrainingHistory:
    """The mean cross-entropy of each epoch, on training and on held-out examples."""

    losses: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)

    @property
    def best_epoch(self) -> int:
        return int(np.argmin(self.held_out_losses))


def wait_for_earlier(losses: Sequence[Any]) -> None:
    """Wait for all steps but the last two, given the losses of all.

    JAX would dispatch a whole epoch ahead, which Ctrl-C then could not end, and of which the bar
    would show nothing. Unlike `block_until_ready`, this wait ends at Ctrl-C.
    """
    while len(losses) > 2 and not losses[-3].is_ready():
        time.sleep(0.001)


def train(
    predictor: LengthPredictor,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    config: TrainingConfig = TrainingConfig(),
    *,
    checkpoints: Path | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> TrainingHistory:
    """Train until the loss on `held_out` stops falling, and adopt the best parameters.

    The predictor serves with its old parameters until the end. It then has no calibration, since
    the old one was fitted to other parameters.

    Args:
      checkpoints: folder for the state after every epoch; training continues from its last one.
      mesh: each batch is split over its `data` axis.

    Raises:
      ValueError: there are no training examples or no held-out examples.
    """
    if not examples or not held_out:
        raise ValueError(
            f"{len(examples)} examples and {len(held_out)} held out are not allowed; pass at least "
            "one of each"
        )
    tokens = predictor.encoder.tokens([example.prompt for example in examples])
    labels = _labels(predictor.buckets, examples)
    weights = _weights(labels, predictor.buckets.num, config.weigh_classes)
    judge = _Judge(predictor, held_out)
    num_steps = -(-len(examples) // config.batch_size) * config.num_epochs
    model = predictor.module()
    model.encoder.compute_in(config.computed_in)
    optimizer = nnx.Optimizer(model, _optimizer(config, num_steps), wrt=nnx.Param)
    history, best = TrainingHistory(), _params(model)
    store = _Store(checkpoints, model, optimizer)
    history, best, first = store.restore(history, best)
    put = _placer(mesh, (model, optimizer))
    lengths = np.asarray([len(ids) for ids in tokens])
    with tqdm(
        total=num_steps,
        initial=num_steps // config.num_epochs * first,
        desc="training",
        unit="step",
        delay=2,
        leave=False,
        disable=not progress,
    ) as bar:
        for epoch in range(first, config.num_epochs):
            if history.losses and len(history.losses) - 1 - history.best_epoch >= config.patience:
                break
            random = np.random.default_rng((config.seed, epoch))
            model.train()
            losses = []
            for batch in shuffled_batches(lengths, config.batch_size, random):
                ids, mask = padded([tokens[i] for i in batch], config.batch_size)
                full = np.zeros((2, config.batch_size), np.float32)
                full[0, : len(batch)], full[1, : len(batch)] = labels[batch], weights[batch]
                loss = _step(model, optimizer, *put(ids, mask, full[0].astype(np.int32), full[1]))
                losses.append(loss)
                wait_for_earlier(losses)
                bar.update()
            history.losses.append(float(np.mean([float(loss) for loss in losses])))
            history.held_out_losses.append(judge.loss(_params(model)))
            bar.set_postfix(held_out=f"{history.held_out_losses[-1]:.3f}")
            if history.best_epoch == epoch:
                best = _params(model)
            store.save(epoch, history, best)
    predictor.adopt(nnx.to_pure_dict(best), None)
    return history


@final
class _Judge:
    def __init__(self, predictor: LengthPredictor, held_out: Sequence[Example]):
        self._predictor = predictor
        self._tokens = predictor.encoder.tokens([example.prompt for example in held_out])
        self._labels = _labels(predictor.buckets, held_out)

    def loss(self, params: nnx.State) -> float:
        logits = self._predictor.logits_of(self._tokens, nnx.to_pure_dict(params))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, self._labels)
        return float(np.mean(np.asarray(each)))


@nnx.jit
def _step(
    model: LengthClassifier,
    optimizer: nnx.Optimizer,
    tokens: Int[Array, "rows width"],
    mask: Bool[Array, "rows width"],
    labels: Int[Array, " rows"],
    weights: Float[Array, " rows"],
) -> Float[Array, ""]:
    def loss_of(model: LengthClassifier) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(model(tokens, mask), labels)
        return (each * weights).sum() / jnp.maximum(weights.sum(), 1e-6)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def adamw(
    learning_rate: optax.ScalarOrSchedule, *, clip_norm: float = 1.0, weight_decay: float = 0.01
) -> optax.GradientTransformation:
    """Return AdamW with gradients clipped by their global norm and weight decay on matrices."""
    steps = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, weight_decay=weight_decay, mask=_decays),
    )

    def update(*args: Any, **kwargs: Any) -> Any:
        # Optax mixes floats with its integer count of steps, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return steps.update(*args, **kwargs)

    return optax.GradientTransformation(steps.init, update)


def _optimizer(config: TrainingConfig, num_steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, int(config.warmup * num_steps)), max(2, num_steps)
    )
    return adamw(schedule, clip_norm=config.clip_norm, weight_decay=config.weight_decay)


def _decays(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _labels(buckets: LengthBuckets, examples: Sequence[Example]) -> Int[np.ndarray, " examples"]:
    return buckets.bucket_of([example.output_length for example in examples])


def _weights(
    labels: Int[np.ndarray, " examples"], num: int, weigh_classes: bool
) -> Float32[np.ndarray, " examples"]:
    if not weigh_classes:
        return np.ones(len(labels), np.float32)
    counts = np.bincount(labels, minlength=num)
    return (len(labels) / (num * counts[labels])).astype(np.float32)


def _params(model: LengthClassifier) -> nnx.State:
    return jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))


def _placer(mesh: Mesh | None, objects: Any) -> Callable[..., tuple[Any, ...]]:
    """Copy `objects` to every device of the mesh; return a function that splits a batch over it."""
    if mesh is None:
        return lambda *arrays: arrays
    state = nnx.state(objects)
    nnx.update(objects, jax.device_put(state, NamedSharding(mesh, PartitionSpec())))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return lambda *arrays: jax.device_put(arrays, rows)


@final
class _Store:
    """An Orbax store of the state after every epoch; without a folder it does nothing."""

    def __init__(self, folder: Path | None, model: LengthClassifier, optimizer: nnx.Optimizer):
        self._objects = (model, optimizer)
        self._manager = None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=1)
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def restore(
        self, history: TrainingHistory, best: nnx.State
    ) -> tuple[TrainingHistory, nnx.State, int]:
        """Restore the last saved state into model and optimizer.

        Return its history, best parameters, and next epoch; without a saved state, the arguments
        and 0.
        """
        if self._manager is None or (epoch := self._manager.latest_step()) is None:
            return history, best, 0
        state = nnx.state(self._objects)
        found = self._manager.restore(
            epoch,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(_plain(state)),
                best=ocp.args.StandardRestore(_plain(best)),
                history=ocp.args.JsonRestore(),
            ),
        )
        _replace(state, found["state"])
        nnx.update(self._objects, state)
        _replace(best, found["best"])
        return TrainingHistory(**found["history"]), best, epoch + 1

    def save(self, epoch: int, history: TrainingHistory, best: nnx.State) -> None:
        if self._manager is None:
            return
        self._manager.save(
            epoch,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_plain(nnx.state(self._objects))),
                best=ocp.args.StandardSave(_plain(best)),
                history=ocp.args.JsonSave(vars(history)),
            ),
        )
        self._manager.wait_until_finished()


def _plain(state: nnx.State) -> list[Any]:
    return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]


def _replace(state: nnx.State, leaves: list[Any]) -> None:
    old, structure = jax.tree.flatten(state)
    new = [
        jax.random.wrap_key_data(given) if _is_key(leaf) else given
        for leaf, given in zip(old, leaves, strict=True)
    ]
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(jax.tree.unflatten(structure, new)))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
