"""The tasks of ExeGPT: prompts and answers with truncated normal lengths.

Table 3 of the paper gives mean, standard deviation and maximum. Its 99th percentiles show that
these are moments of the truncated distribution, not of the normal distribution before truncation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.items import WorkloadItem


@final
@dataclass(frozen=True)
class Lengths:
    """A normal distribution over whole lengths, truncated to 1 ... `most`.

    Attributes:
      mean, std: moments of the truncated distribution, in tokens.
    """

    mean: float
    std: float
    most: int

    def probabilities(self) -> np.ndarray:
        """Return the probabilities of the lengths 1 ... `most`, float64 [most].

        A fixed-point iteration finds the centre and width of the normal. No normal truncated to 1
        ... `most` has a larger deviation than the uniform distribution, which is returned for a
        larger `std`.
        """
        lengths = np.arange(1, self.most + 1)
        probabilities = np.full(self.most, 1 / self.most)
        if self.std >= lengths.std():
            return probabilities
        centre, width = self.mean, self.std
        for _ in range(200):
            weights = np.exp(-(((lengths - centre) / width) ** 2) / 2)
            probabilities = weights / weights.sum()
            mean = probabilities @ lengths
            std = np.sqrt(probabilities @ (lengths - mean) ** 2)
            centre += self.mean - mean
            width *= self.std / std
        return probabilities


@final
@dataclass(frozen=True)
class Task:
    about: str
    inputs: Lengths
    outputs: Lengths


# No truncated normal has the deviation of the inputs of S and T, so these are uniform.
TASKS = {
    "S": Task("summarization", Lengths(256, 252, 512), Lengths(32, 13, 80)),
    "T": Task("translation", Lengths(128, 81, 256), Lengths(128, 68, 320)),
    "G": Task("code generation", Lengths(64, 23, 128), Lengths(192, 93, 480)),
    "C1": Task("conversation", Lengths(256, 115, 512), Lengths(64, 30, 160)),
    "C2": Task("conversation", Lengths(512, 252, 1024), Lengths(256, 134, 640)),
}


def task_items(
    name: str, num: int, *, vocab_size: int, seed: int, scale: float = 1.0
) -> list[WorkloadItem]:
    """Return `num` prompts of uniformly random token ids, with independent answer lengths.

    The scheduler knows only the task's maximum answer length.

    Args:
      name: S, T, G, C1 or C2.
      scale: multiplies every length, for models whose context is too short for the task.

    Raises:
      InvalidConfigError: the name is unknown, a count is below 1, or the scale is not above 0.
    """
    if name not in TASKS:
        raise InvalidConfigError(f"task {name!r} is unknown; pass one of {', '.join(TASKS)}")
    for argument, count in (("num", num), ("vocab_size", vocab_size)):
        if count < 1:
            raise InvalidConfigError(f"{argument}={count} is not allowed; pass at least 1")
    if not 0 < scale < float("inf"):
        raise InvalidConfigError(f"scale={scale} is not allowed; pass a number above 0")
    task, rng = TASKS[name], np.random.default_rng(seed)
    input_lengths = _draw(task.inputs, num, rng, scale)
    output_lengths = _draw(task.outputs, num, rng, scale)
    return [
        WorkloadItem(
            prompt_token_ids=tuple(rng.integers(0, vocab_size, num_prompt).tolist()),
            num_output_tokens=num_output,
            max_tokens=_scaled(task.outputs.most, scale),
        )
        for num_prompt, num_output in zip(input_lengths, output_lengths, strict=True)
    ]


def _draw(lengths: Lengths, num: int, rng: np.random.Generator, scale: float) -> list[int]:
    drawn = rng.choice(np.arange(1, lengths.most + 1), num, p=lengths.probabilities())
    return [_scaled(length, scale) for length in drawn.tolist()]


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
