"""The table of distributions agrees with a slow dictionary."""

from __future__ import annotations

import random

import numpy as np

from jaxserve.core.prediction import LengthPrediction
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.lengths import LengthTable

BUCKETS = LengthBuckets.equal_width(40, 4)
FINER = LengthBuckets.equal_width(40, 8)


def test_rows_are_those_that_were_set_last():
    """This holds through growth, reuse of rows and other buckets; 500 random edits per seed."""
    for seed in range(5):
        rng, drawn = random.Random(seed), np.random.default_rng(seed)
        table, wanted = LengthTable(BUCKETS), {}
        for _ in range(500):
            key = rng.randrange(200)
            if rng.random() < 0.2:
                table.drop(key)
                wanted.pop(key, None)
                continue
            buckets = rng.choice([BUCKETS, FINER])
            probabilities, at = drawn.dirichlet(np.ones(buckets.num)), rng.randrange(30)
            table.put(key, LengthPrediction(buckets, probabilities), at)
            coarse = probabilities if buckets == BUCKETS else probabilities.reshape(4, 2).sum(1)
            wanted[key] = (coarse, at)
        keys = list(wanted)
        rows = table.rows_of(keys)
        assert table.has_own(rows) and len(set(rows)) == len(keys) > 64, f"seed {seed}"
        np.testing.assert_allclose(table.probabilities(rows), [wanted[key][0] for key in keys])
        np.testing.assert_allclose(
            table.distributions(rows).probabilities, [wanted[key][0] for key in keys]
        )
        assert table.at(rows).tolist() == [wanted[key][1] for key in keys]


def test_a_sequence_without_a_row_may_have_any_length():
    """It may be beside one with a row; if no sequence has a row, the table is empty."""
    buckets = LengthBuckets((0, 10, 40))
    table = LengthTable(buckets)
    assert not table.has_own(table.rows_of([1, 2])) and not table.has_own(table.rows_of([]))
    table.put(1, LengthPrediction(buckets, np.asarray([1.0, 0.0])), 7)
    rows = table.rows_of([2, 1])
    assert table.has_own(rows)
    np.testing.assert_allclose(table.distributions(rows).probabilities, [[0.25, 0.75], [1.0, 0.0]])
    assert table.at(rows).tolist() == [0, 7]
    table.drop(1)
    assert not table.has_own(table.rows_of([1, 2]))


def test_rows_are_corrected_by_answers_that_ended():
    """Answers that were predicted short and are long make others longer, those that begin too."""
    table = LengthTable(BUCKETS)
    short = LengthPrediction(BUCKETS, np.asarray([0.97, 0.01, 0.01, 0.01]))
    table.put(0, short, 0)
    table.put(1, short, 5)
    for key in range(2, 12):
        table.put(key, short, 0)
        table.note_end(key, 35, is_whole=True)
        table.drop(key)
        if table.is_correction_due:
            table.correct([(0, 30)])
    table.put(2, short, 0)
    longest = table.distributions(table.rows_of([0, 1, 2])).probabilities[:, 3]
    assert longest[0] == longest[2] > 0.5 and longest[1] == 0.01, "a reading stays as it was"
    np.testing.assert_allclose(table.probabilities(table.rows_of([0])), [short.probabilities])
