"""Reinforcement learning of sums with GRPO: `python -m examples.grpo --help`.

A small Llama writes sums such as "17+8=25.", one token a character. It sees worked sums for a few
steps, as a base model would, and then learns from a reward alone: 1 for the right sum, 0 for all
else. The program shows how a trainer and a `Runtime` in one process work together:

- The runtime serves the trainer's own arrays. After each batch `rt.update_params` hands it the new
  ones: nothing is copied, and no step compiles.
- With `deterministic=True` sampling reports, bit for bit, the log-probabilities that the trainer
  computes. So the importance ratio is exactly 1 at the first inner step, which is checked, and GRPO
  (arXiv:2402.03300) needs no forward pass for the probabilities of the old policy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int32
from matplotlib.figure import Figure
from tqdm import tqdm

from jaxserve import Runtime, SamplingParams
from jaxserve.models.families.llama import Llama, LlamaConfig

SYMBOLS = "0123456789+=."  # one token each; a full stop ends an answer
END = SYMBOLS.index(".")
PROBLEMS = [f"{a}+{b}=" for a in range(20) for b in range(20)]
MAX_ANSWER = len("38.")
WIDTH = len("19+19=") + MAX_ANSWER  # tokens of the longest sequence
CLIP = 0.2
# Of the runtime. Steps of few sizes, and pages as long as an answer, are quickly compiled.
SERVING: dict[str, Any] = dict(
    deterministic=True, max_slots=64, max_step_tokens=512, page_size=16, progress=False
)


def encode(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [SYMBOLS.index(symbol) for symbol in text]


def solution(problem: str) -> list[int]:
    """Return the tokens of the right answer."""
    first, second = problem.rstrip("=").split("+")
    return encode(f"{int(first) + int(second)}.")


def reward(problem: str, answer: Sequence[int]) -> float:
    """Return 1 for the right answer and 0 for all else."""
    return float(list(answer) == solution(problem))


@final
class Batch(NamedTuple):
    """Problems with answers, as a step of the optimizer takes them.

    Attributes:
      tokens: padded at the end, which changes nothing before.
      mask: 1 for tokens of answers. Like `logprobs`, it has no place for a sequence's first token.
      logprobs: of tokens of answers, as sampling reported them.
      advantages: how much better an answer is than its group, in standard deviations.
    """

    tokens: Int32[np.ndarray, "answers width"]
    mask: Float32[np.ndarray, "answers width_minus_1"]
    logprobs: Float32[np.ndarray, "answers width_minus_1"]
    advantages: Float32[np.ndarray, " answers"]

    @classmethod
    def empty(cls, num_answers: int) -> Batch:
        """Return a batch to fill in."""
        mask, logprobs = np.zeros((2, num_answers, WIDTH - 1), np.float32)
        tokens = np.full((num_answers, WIDTH), END, np.int32)
        return cls(tokens, mask, logprobs, np.ones(num_answers, np.float32))

    def put(
        self, row: int, problem: str, answer: Sequence[int], logprobs: Sequence[float] = ()
    ) -> None:
        """Fill in a problem and an answer to it."""
        tokens = [*encode(problem), *answer]
        places = slice(len(problem) - 1, len(tokens) - 1)
        self.tokens[row, : len(tokens)] = tokens
        self.mask[row, places] = 1
        if logprobs:
            self.logprobs[row, places] = logprobs


def sampled(rt: Runtime, problems: Sequence[str], group: int, seed: int) -> tuple[Batch, float]:
    """Return a group of sampled answers to each problem, and their mean reward."""
    sampling = [
        # `logprobs=0` asks for those of the sampled tokens alone.
        SamplingParams(
            temperature=1.0,
            max_tokens=MAX_ANSWER,
            stop_token_ids=(END,),
            n=group,
            logprobs=0,
            seed=seed * len(problems) + i,
        )
        for i in range(len(problems))
    ]
    done = rt.generate([encode(problem) for problem in problems], sampling, progress=False)
    batch, rewards = Batch.empty(len(problems) * group), np.zeros((len(problems), group))
    for i, (problem, completion) in enumerate(zip(problems, done, strict=True)):
        if completion.error is not None:
            raise completion.error
        for j, sample in enumerate(completion.samples):
            logprobs = [token.logprob for token in sample.logprobs or ()]
            batch.put(i * group + j, problem, sample.token_ids, logprobs)
            rewards[i, j] = reward(problem, sample.token_ids)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    batch.advantages[:] = (centred / (rewards.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)
    return batch, float(rewards.mean())


Logprobs = Float32[Array, "answers width_minus_1"]


def imitation_loss(logprobs: Logprobs, batch: Batch) -> Float32[Array, ""]:
    """Return the cross-entropy of the answers."""
    return -jnp.sum(logprobs * batch.mask) / jnp.sum(batch.mask)


def grpo_loss(logprobs: Logprobs, batch: Batch) -> Float32[Array, ""]:
    """Return the clipped objective of GRPO, with its sign changed, per token of an answer."""
    ratio = jnp.exp((logprobs - batch.logprobs) * batch.mask)
    advantages = batch.advantages[:, None]
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    return -jnp.sum(objective * batch.mask) / jnp.sum(batch.mask)


@final
class Trainer:
    """Parameters of a model, and the optimizer that changes them.

    Attributes:
      params: the newest parameters. A step does not donate them, because a runtime serves them.
    """

    def __init__(
        self,
        model: Llama,
        loss: Callable[[Logprobs, Batch], Float32[Array, ""]],
        learning_rate: float,
    ):
        graphdef, self.params = nnx.split(model)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
        self._state = optimizer.init(self.params)

        def objective(params: nnx.State, batch: Batch) -> Any:
            logprobs = nnx.merge(graphdef, params).whole_logprobs(jnp.asarray(batch.tokens))
            return loss(logprobs, batch), logprobs

        @jax.jit
        def update(params: nnx.State, state: optax.OptState, batch: Batch) -> Any:
            gradients, logprobs = jax.grad(objective, has_aux=True)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, logprobs

        self._update = update

    def step(self, batch: Batch) -> Float32[np.ndarray, "answers width_minus_1"]:
        """Take a step; return the log-probabilities of the answers before it, as `Batch` has."""
        self.params, self._state, logprobs = self._update(self.params, self._state, batch)
        return np.asarray(logprobs) * batch.mask


def small_model(seed: int) -> Llama:
    """Return a Llama of two layers with random weights."""
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position_embeddings=16,
    )
    return Llama(config, rngs=nnx.Rngs(seed))


def imitate(model: Llama, problems: Sequence[str], num_steps: int, seed: int) -> None:
    """Train the model on right answers for some steps."""
    trainer, rng = Trainer(model, imitation_loss, 2e-3), np.random.default_rng(seed)
    for _ in tqdm(range(num_steps), "worked sums"):
        batch = Batch.empty(128)
        for row, problem in enumerate(rng.choice(problems, 128).tolist()):
            batch.put(row, problem, solution(problem))
        trainer.step(batch)
    nnx.update(model, trainer.params)


def learn(
    rt: Runtime, trainer: Trainer, problems: Sequence[str], options: argparse.Namespace
) -> Iterator[float]:
    """Sample, reward, train and update the served weights; yield the mean reward of each step."""
    rng = np.random.default_rng(options.seed)
    for number in range(options.steps):
        chosen = rng.choice(problems, options.problems).tolist()
        batch, mean_reward = sampled(rt, chosen, options.group, number)
        for inner in range(options.inner_steps):
            logprobs = trainer.step(batch)
            # The same arrays and the same kernels: the importance ratio is exactly 1 at first.
            assert inner > 0 or np.array_equal(logprobs, batch.logprobs), "not the bits of sampling"
        rt.update_params(trainer.params)
        yield mean_reward


def accuracy(rt: Runtime, problems: Sequence[str]) -> float:
    """Return the share of problems with a right greedy answer."""
    greedy = SamplingParams(max_tokens=MAX_ANSWER, stop_token_ids=(END,))
    done = rt.generate([encode(problem) for problem in problems], greedy, progress=False)
    return float(np.mean([reward(p, d.token_ids) for p, d in zip(problems, done, strict=True)]))


def plot(rewards: Sequence[float], unseen: Sequence[float], path: Path) -> None:
    """Draw the reward of each step, and the accuracy on unseen sums before and after."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(rewards, color="0.8", label="reward of a step")
    width = max(1, len(rewards) // 12)
    means = np.convolve(rewards, np.full(width, 1 / width), "valid") if rewards else []
    axes.plot(np.arange(len(means)) + width - 1, means, label=f"mean of {width} steps")
    axes.plot([0, len(rewards)][: len(unseen)], unseen, "o", label="unseen sums, greedy")
    axes.set(xlabel="weight updates", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Train, draw the rewards and print a summary; Ctrl-C ends the training early."""
    options = build_parser().parse_args(arguments)
    shuffled = np.random.default_rng(options.seed).permutation(PROBLEMS).tolist()
    unseen, problems = shuffled[: len(PROBLEMS) // 5], shuffled[len(PROBLEMS) // 5 :]
    model = small_model(options.seed)
    imitate(model, problems, options.worked_steps, options.seed)
    trainer = Trainer(model, grpo_loss, options.learning_rate)
    rewards: list[float] = []
    with Runtime(model, trainer.params, **SERVING) as rt:
        right = [accuracy(rt, unseen)]
        try:
            with tqdm(learn(rt, trainer, problems, options), "GRPO", options.steps) as bar:
                for mean_reward in bar:
                    rewards.append(mean_reward)
                    bar.set_postfix(reward=f"{mean_reward:.2f}")
            right.append(accuracy(rt, unseen))
        except KeyboardInterrupt:
            print(f"stopped after {len(rewards)} of {options.steps} steps", file=sys.stderr)
    plot(rewards, right, options.plot)
    tenth = max(1, len(rewards) // 10)
    first, last = (np.mean(part) if part else 0.0 for part in (rewards[:tenth], rewards[-tenth:]))
    print(
        f"reward: {first:.2f} in the first {tenth} steps, {last:.2f} in the last; unseen sums that "
        f"are right: {' then '.join(f'{share:.0%}' for share in right)}; picture: {options.plot}"
    )
    return 0 if len(right) == 2 else 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo",
        description="Teach sums to a small Llama with GRPO, and draw its reward. It takes a minute "
        "on two cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=250, help="batches of answers, each with a weight update")
    add("--problems", type=int, default=32, help="problems in a batch")
    add("--group", type=int, default=8, help="answers to each problem")
    add("--inner-steps", type=int, default=2, help="steps of the optimizer on each batch")
    add("--learning-rate", type=float, default=5e-4, help="of GRPO")
    add("--worked-steps", type=int, default=40, help="steps on worked sums before it")
    add("--seed", type=int, default=0, help="of weights, problems and answers")
    add("--plot", type=_picture, default="grpo.png", help="picture to write, PNG or SVG")
    return parser


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg") or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a .png or .svg file in a folder that exists"
        )
    return path


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before or after the training
        sys.exit(130)
