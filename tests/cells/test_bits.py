"""A request has the bits that it has alone in any mix, also while others are cancelled."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from jaxserve.cells import CellRuntime
from jaxserve.kernels import build
from tests.cells.shipped import model_of
from tests.common.tiers import some

pytestmark = pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")

VOCAB = 13
NUM_REQUESTS = 40


def _tree(random: Random, num_leaves: int) -> Any:
    if num_leaves == 1:
        return random.randrange(VOCAB)
    left = random.randint(1, num_leaves - 1)
    return _tree(random, left), _tree(random, num_leaves - left)


@pytest.mark.parametrize(
    "kind",
    some(["lstm", "large lstm", "gru", "tree", "large tree", "lstm seq2seq", "gru seq2seq"], 3),
)
def test_bits_do_not_depend_on_the_mix(kind: str):
    """Of chains, trees and loops, by kernels for small weights and for large ones.

    Large ones are those that no kernel keeps in the cache of a core.
    """
    random, hidden = Random(kind), 264 if "large" in kind else 20
    model = model_of(kind, vocab=VOCAB, embed=12, hidden=hidden, sizes=(1, 4, 16))
    given = [
        _tree(random, random.randint(1, 9))
        if "tree" in kind
        else [random.randrange(VOCAB) for _ in range(random.randint(1, 12))]
        for _ in range(NUM_REQUESTS)
    ]
    num_cancelled = 0
    with CellRuntime(model.cells, model.unfold, progress=False, warmup=False) as rt:
        alone = [rt.generate([one])[0] for one in given]
        for _ in range(3):
            order = random.sample(range(NUM_REQUESTS), NUM_REQUESTS)
            pending = {}
            for number in order:
                pending[number] = rt.submit(given[number])
                if random.random() < 0.2:
                    pending[random.choice(list(pending))].cancel()
            for number, one in pending.items():
                completion = one.result(60)
                if completion.finish_reason == "cancelled":
                    num_cancelled += 1
                    continue
                assert completion.error is None
                for name, value in completion.values.items():
                    np.testing.assert_array_equal(value, alone[number][name])
        rt.check_integrity()
    assert 0 < num_cancelled < NUM_REQUESTS
