"""Made-up activations that determine the remaining length of an answer."""

from __future__ import annotations

import numpy as np

from jaxserve.predictor import LengthBuckets, Readings

BUCKETS = LengthBuckets.logarithmic(128, 7)
WIDTH = 12
INTERVAL = 8


def planted(num_answers: int, seed: int = 0, noise: float = 0.3) -> Readings:
    """Return activations: two directions hold the log of what remains, a large one is noise."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(np.log(2), np.log(128), num_answers)).astype(int)
    elapsed = [np.arange(0, length, INTERVAL) for length in lengths]
    answer = np.repeat(np.arange(num_answers), [len(each) for each in elapsed])
    flat = np.concatenate(elapsed)
    left = np.log(lengths[answer] - flat)
    activations = random.normal(0, 1, (len(flat), WIDTH))
    activations[:, 0] = 5.0 * (left + noise * random.normal(size=len(flat)))
    activations[:, 1] = 1e-3 * (left + noise * random.normal(size=len(flat)))
    activations[:, 2] += 1e4
    return Readings(
        activations=activations.astype(np.float32), answer=answer, elapsed=flat, lengths=lengths
    )
