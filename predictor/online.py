"""Online training on served answers, in the background (S3, section 3.1: the supervisor).

Training steps change a copy of the parameters. Every `OnlineConfig.adopt_every` steps the copy is
compared with the serving parameters on recent held-out requests, and replaces them unless its loss
is higher.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.predictor.calibration import Calibration
from jaxserve.predictor.data import padded, width_of
from jaxserve.predictor.evaluation import evaluate
from jaxserve.predictor.predictor import LengthPredictor, Params
from jaxserve.predictor.training import adamw

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Budget:
    """A budget of seconds that grows by a share of the time that passes.

    The caller passes times; this class reads no clock. If no work costs more than was passed to
    `wait_s`, the time spent since `at_s` is at most `share` of the time passed. Time spent beyond
    that is a debt, which delays the next work.

    Attributes:
      share: earned seconds per second, over 0 and at most 1.
      at_s: time at which the budget was `level_s`.
      level_s: seconds available at `at_s`; negative is a debt.
      most_s: maximum of the budget, except for a single piece of work that costs more.
    """

    share: float
    at_s: float
    level_s: float = 0.0
    most_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share={self.share} is not allowed; pass a share over 0, at most 1")

    def wait_s(self, now_s: float, cost_s: float) -> float:
        """Return the seconds from `now_s` until work of this cost may begin."""
        return max(0.0, (cost_s - self._level_s(now_s, cost_s)) / self.share)

    def spent(self, begin_s: float, cost_s: float) -> Budget:
        """Return the budget after work that began at `begin_s` and took `cost_s`."""
        level_s = self._level_s(begin_s, cost_s) - cost_s
        return replace(self, at_s=begin_s, level_s=level_s)

    def _level_s(self, now_s: float, cost_s: float) -> float:
        earned_s = self.share * max(0.0, now_s - self.at_s)
        return min(max(self.most_s, cost_s), self.level_s + earned_s)


@final
@dataclass(frozen=True)
class Observation:
    """One answered prompt, as tokens of the predictor's encoder, and the length of its answer.

    `bucket` is that of the answer's `length`; `predicted` was predicted as likeliest.
    """

    tokens: Int32[np.ndarray, " tokens"]
    length: int
    bucket: int
    predicted: int

    @property
    def is_wrong(self) -> bool:
        return self.bucket != self.predicted


@final
class ReplayBuffer:
    """A buffer of the newest observations, with fewer of the correctly predicted ones.

    Args:
      capacity: maximum number of observations; beyond it, the oldest is removed.
      favour: 1 or more. A full buffer keeps one in `favour` of the correctly predicted
        observations, and a sample draws each of them `favour` times less often.
    """

    def __init__(self, capacity: int, favour: float = 2.0):
        if capacity < 1 or favour < 1.0:
            raise ValueError(
                f"capacity={capacity} and favour={favour} are not allowed; pass 1 or more of both"
            )
        self.capacity = capacity
        self.favour = favour
        self._items: deque[Observation] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._items)

    def add(self, observation: Observation, random: np.random.Generator) -> None:
        """Add an observation, or drop it; deterministic given the generator's state."""
        is_full = len(self._items) == self.capacity
        if not is_full or observation.is_wrong or random.random() * self.favour < 1.0:
            self._items.append(observation)

    def sample(self, num: int, random: np.random.Generator) -> list[Observation]:
        weights = np.asarray([self.favour if item.is_wrong else 1.0 for item in self._items])
        drawn = random.choice(len(weights), num, p=weights / weights.sum())
        return [self._items[index] for index in drawn]

    def restore(self, observations: Iterable[Observation]) -> None:
        self._items = deque(observations, maxlen=self.capacity)


def pack(observations: Iterable[Observation], prefix: str) -> dict[str, np.ndarray]:
    """Return arrays for `unpack`; their names begin with `prefix`."""
    kept = list(observations)
    numbers = [(len(o.tokens), o.length, o.bucket, o.predicted) for o in kept]
    return {
        f"{prefix}_tokens": np.concatenate([np.zeros(0, np.int32), *(o.tokens for o in kept)]),
        f"{prefix}_numbers": np.asarray(numbers, np.int64).reshape(-1, 4),
    }


def unpack(arrays: Mapping[str, np.ndarray], prefix: str) -> list[Observation]:
    numbers = arrays[f"{prefix}_numbers"]
    tokens = np.split(arrays[f"{prefix}_tokens"], np.cumsum(numbers[:, 0])[:-1])
    return [
        Observation(own, int(length), int(bucket), int(predicted))
        for own, (_, length, bucket, predicted) in zip(tokens, numbers, strict=False)
    ]


@final
class Candidate:
    """Parameters under training, at first the serving ones.

    Every computation has one shape, so that it compiles once.
    """

    def __init__(self, predictor: LengthPredictor, *, batch_size: int, learning_rate: float):
        self._predictor = predictor
        self._batch_size = batch_size
        self._width = width_of(predictor.encoder.max_tokens)
        self._optimizer = adamw(learning_rate)
        self._update, self._apply = jax.jit(self._updated), jax.jit(predictor.apply)
        self.restart()

    def restart(self) -> None:
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
        return jax.tree.leaves((self.params, self._moments))

    def restore(self, leaves: Sequence[Any]) -> None:
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


FOLDER = "online"
_STATE, _OBSERVATIONS, _DESCRIPTION = "state", "observations.npz", "online.json"
# Observations that one piece of "digest" work takes from the inbox.
_DIGESTED = 64
# Largest factor by which the estimated cost of a kind of work falls from one piece to the next.
_FADE = 0.9


@final
@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """The settings of online training.

    Attributes:
      max_share: maximum share of wall time that is spent learning.
      burst_s: maximum seconds of unspent learning time that are saved up.
      max_epochs: maximum number of times that an observation is learned from, on average.
      capacity, favour: see `ReplayBuffer`.
      adopt_every: steps between two comparisons with the serving parameters.
      holdout_every: every n-th observation is held out and never learned from.
      holdout_size: maximum number of held-out observations; the newest are kept.
      min_holdout: number of held-out observations below which no comparison is made.
      patience: number of consecutive lost comparisons after which the copy is discarded.
    """

    max_share: float = 0.01
    burst_s: float = 1.0
    batch_size: int = 16
    learning_rate: float = 5e-5
    max_epochs: int = 4
    capacity: int = 4096
    favour: float = 2.0
    adopt_every: int = 64
    holdout_every: int = 8
    holdout_size: int = 256
    min_holdout: int = 64
    patience: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "max_epochs",
            "capacity",
            "adopt_every",
            "holdout_size",
            "min_holdout",
            "patience",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; pass 1 or more")
        if self.holdout_every < 2:
            raise ValueError(
                f"holdout_every={self.holdout_every} is not allowed; pass 2 or more, so that "
                "something is left to learn from"
            )
        if self.min_holdout > self.holdout_size:
            raise ValueError(
                f"min_holdout={self.min_holdout} is not allowed; pass at most "
                f"holdout_size={self.holdout_size}"
            )
        if not 0.0 < self.max_share <= 1.0 or self.learning_rate <= 0.0:
            raise ValueError(
                f"max_share={self.max_share} and learning_rate={self.learning_rate} are not "
                "allowed; pass a share over 0 and at most 1, and a rate over 0"
            )


@final
@dataclass
class Counters:
    """Counters of all online training, across `save` and `load`.

    Attributes:
      mispredicted: observations whose likeliest bucket was wrong.
      rejections: comparisons that the copy lost.
      seconds: time spent learning, without start-up.
    """

    observed: int = 0
    mispredicted: int = 0
    steps: int = 0
    adoptions: int = 0
    rejections: int = 0
    seconds: float = 0.0


@final
@dataclass
class _Progress:
    """The learner's position: of `num_seen` observations, `num_learned` went to the buffer.

    `compared_at` is the step of the last comparison, `lost_in_a_row` the consecutive lost ones.
    """

    num_seen: int = 0
    num_learned: int = 0
    compared_at: int = 0
    lost_in_a_row: int = 0


@final
class OnlineLearner:
    """A trainer that fits a predictor to observed answers while the predictor serves.

    `start` trains in a background thread; without it, only `step_once` trains. As a context manager
    it starts on entry and closes on exit.
    """

    def __init__(self, predictor: LengthPredictor, config: OnlineConfig = OnlineConfig()):
        self.predictor = predictor
        self.config = config
        self._random = np.random.default_rng(config.seed)
        self._inbox: deque[tuple[Any, int, int | None]] = deque(maxlen=config.capacity)
        self._buffer = ReplayBuffer(config.capacity, config.favour)
        self._holdout: deque[Observation] = deque(maxlen=config.holdout_size)
        self._counters = Counters()
        self._progress = _Progress()
        self._candidate = Candidate(
            predictor, batch_size=config.batch_size, learning_rate=config.learning_rate
        )
        self._costs_s: dict[str, float] = {}
        self._observing, self._working = threading.Lock(), threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._has_failed = False
        self._thread: threading.Thread | None = None

    @property
    def counters(self) -> Counters:
        return replace(self._counters)

    @property
    def is_learning(self) -> bool:
        """Whether the training thread runs: started, not closed, and not failed."""
        return self._thread is not None and self._thread.is_alive() and not self._has_failed

    def observe(self, prompt: str | np.ndarray, length: int, predicted: int | None = None) -> None:
        """Record a finished answer. Thread-safe; returns at once and never raises.

        Args:
          prompt: the prompt's text, or its tokens from the predictor's encoder.
          length: number of tokens of the answer; an observation with less than 1 is ignored.
          predicted: the bucket that was predicted as likeliest; by default it is predicted again,
            which takes time from learning.
        """
        try:
            if length < 1 or self._stop.is_set() or self._has_failed:
                return
            given: str | np.ndarray = prompt
            if not isinstance(prompt, str):
                given = self.predictor.encoder.shortened(np.asarray(prompt, np.int32).reshape(-1))
            with self._observing:
                self._inbox.append(
                    (given, int(length), None if predicted is None else int(predicted))
                )
                self._counters.observed += 1
            self._wake.set()
        except Exception:
            _log.debug("an observation was ignored", exc_info=True)

    def start(self) -> None:
        """Compile, then start the training thread."""
        if self._thread is not None:
            return
        step_s, logits_s = self._candidate.warm_up()
        num_judged = -(-self.config.holdout_size // self.config.batch_size)
        num_digested = -(-_DIGESTED // self.config.batch_size)
        self._costs_s = {
            "learn": step_s,
            "compare": 2 * num_judged * logits_s,
            "digest": num_digested * logits_s,
        }
        self._thread = threading.Thread(target=self._run, name="online-learner", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop learning after the current step. The parameters adopted so far keep serving."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> OnlineLearner:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step_once(self) -> bool:
        """Take one step in this thread, on everything observed so far, without a time budget.

        A comparison follows when it is due. Return False if there was nothing to learn from.
        """
        with self._working:
            while self._inbox:
                self._timed("digest")
            if not self._may_learn():
                return False
            self._timed("learn")
            if self._may_compare():
                self._timed("compare")
            return True

    def holdout_loss(self) -> float:
        """Return the serving parameters' mean cross-entropy on the held-out observations.

        The logits are calibrated on the same observations.
        """
        with self._working:
            return self._candidate.judged(self.predictor.params, self._holdout)[0]

    def save(self, folder: str | Path) -> None:
        """Write the serving predictor and the state that `load` needs to continue."""
        folder = Path(folder).absolute()
        with self._working:
            while self._inbox:
                self._timed("digest")
            self.predictor.save(folder)
            own = folder / FOLDER
            own.mkdir(exist_ok=True)
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(own / _STATE, self._candidate.leaves(), force=True)
            arrays = pack(self._buffer, "buffer") | pack(self._holdout, "holdout")
            np.savez(own / _OBSERVATIONS, **arrays)  # pyrefly: ignore[bad-argument-type]
            description = {
                "config": asdict(self.config),
                "counters": asdict(self._counters),
                "random": self._random.bit_generator.state,
                "progress": asdict(self._progress),
            }
            (own / _DESCRIPTION).write_text(json.dumps(description) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, config: OnlineConfig | None = None) -> OnlineLearner:
        """Continue from what `save` wrote, or start new from a folder with only a predictor.

        Args:
          config: by default the one that was saved.

        Raises:
          ValueError: the folder has no predictor.
        """
        folder = Path(folder).absolute()
        predictor, own = LengthPredictor.load(folder), folder / FOLDER
        if not (own / _DESCRIPTION).is_file():
            return cls(predictor, config or OnlineConfig())
        given = json.loads((own / _DESCRIPTION).read_text(encoding="utf-8"))
        learner = cls(predictor, config or OnlineConfig(**given["config"]))
        learner._counters = Counters(**given["counters"])
        learner._random.bit_generator.state = given["random"]
        learner._progress = _Progress(**given["progress"])
        with np.load(own / _OBSERVATIONS) as arrays:
            learner._buffer.restore(unpack(arrays, "buffer"))
            learner._holdout.extend(unpack(arrays, "holdout"))
        with ocp.StandardCheckpointer() as checkpointer:
            leaves = checkpointer.restore(own / _STATE, learner._candidate.leaves())
        learner._candidate.restore(leaves)
        return learner

    # The methods below run under `_working`, or before the thread starts.

    def _run(self) -> None:
        budget = Budget(self.config.max_share, at_s=time.perf_counter(), most_s=self.config.burst_s)
        try:
            while not self._stop.is_set():
                work = self._next()
                if work is None:
                    self._wake.wait()
                    self._wake.clear()
                    continue
                begin_s = time.perf_counter()
                wait_s = budget.wait_s(begin_s, self._costs_s[work])
                if wait_s > 0.0:
                    self._stop.wait(wait_s)
                    continue
                with self._working:
                    budget = budget.spent(begin_s, self._timed(work))
        except Exception:
            _log.exception("online training has stopped; the predictor keeps its parameters")
            self._has_failed = True

    def _next(self) -> str | None:
        if self._inbox:
            return "digest"
        if self._may_compare():
            return "compare"
        return "learn" if self._may_learn() else None

    def _timed(self, work: str) -> float:
        todo: dict[str, Callable[[], None]] = {
            "digest": self._digest,
            "learn": self._learn,
            "compare": self._compare,
        }
        begin_s = time.perf_counter()
        todo[work]()
        cost_s = time.perf_counter() - begin_s
        self._counters.seconds += cost_s
        self._costs_s[work] = max(cost_s, _FADE * self._costs_s.get(work, 0.0))
        return cost_s

    def _digest(self) -> None:
        with self._observing:
            num = min(len(self._inbox), _DIGESTED)
            given = [self._inbox.popleft() for _ in range(num)]
        texts = [prompt for prompt, _, _ in given if isinstance(prompt, str)]
        encoded = iter(self.predictor.encoder.tokens(texts))
        tokens = [next(encoded) if isinstance(p, str) else p for p, _, _ in given]
        unknown = [i for i, (_, _, predicted) in enumerate(given) if predicted is None]
        logits = self._candidate.logits([tokens[i] for i in unknown], self.predictor.params)
        again = dict(zip(unknown, logits.argmax(1).tolist(), strict=True))
        for i, (_, length, predicted) in enumerate(given):
            bucket = int(self.predictor.buckets.bucket_of(length))
            likeliest = again[i] if predicted is None else predicted
            observation = Observation(tokens[i], length, bucket, likeliest)
            self._counters.mispredicted += observation.is_wrong
            self._progress.num_seen += 1
            if self._progress.num_seen % self.config.holdout_every == 0:
                self._holdout.append(observation)
            else:
                self._buffer.add(observation, self._random)
                self._progress.num_learned += 1

    def _may_learn(self) -> bool:
        has_enough = len(self._buffer) >= self.config.batch_size
        num_drawn = self._counters.steps * self.config.batch_size
        return has_enough and num_drawn < self.config.max_epochs * self._progress.num_learned

    def _learn(self) -> None:
        loss = self._candidate.learn(self._buffer.sample(self.config.batch_size, self._random))
        self._counters.steps += 1
        if not math.isfinite(loss):
            self._restart()

    def _may_compare(self) -> bool:
        is_due = self._counters.steps - self._progress.compared_at >= self.config.adopt_every
        return is_due and len(self._holdout) >= self.config.min_holdout

    def _compare(self) -> None:
        """Recalibrate the copy, and adopt it unless its held-out loss is higher."""
        self._progress.compared_at = self._counters.steps
        kept = list(self._holdout)
        serving_loss, _ = self._candidate.judged(self.predictor.params, kept)
        loss, calibration = self._candidate.judged(self._candidate.params, kept)
        if calibration is not None and loss <= serving_loss:
            self.predictor.adopt(self._candidate.params, calibration)
            self._counters.adoptions += 1
            self._progress.lost_in_a_row = 0
            return
        self._counters.rejections += 1
        self._progress.lost_in_a_row += 1
        if calibration is None or self._progress.lost_in_a_row >= self.config.patience:
            self._restart()

    def _restart(self) -> None:
        self._candidate.restart()
        self._progress.lost_in_a_row = 0
