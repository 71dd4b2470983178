"""A predictor and the baselines are measured in the same way."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.predictor import PROMISES, Calibration, Example, compare
from jaxserve.predictor.data import split_in_three
from jaxserve.predictor.evaluation import prompt_lengths
from tests.predictor.tiny import BUCKETS, examples

pytestmark = pytest.mark.fast


def _oracle(prompts):
    """Return a predictor that reads the quarter of an answer's length from the first word."""
    quarters = [int(prompt.split()[0][1:]) % 4 for prompt in prompts]
    return 4.0 * np.eye(BUCKETS.num)[quarters]


def test_a_better_predictor_has_better_figures():
    """All have the requested miss rate; a better one reserves less and has a smaller error."""
    parts = split_in_three(examples(4000), held_out=0.25)

    def embeddings(prompts):
        return np.concatenate([_oracle(prompts), prompt_lengths(prompts)], axis=1)

    done = compare(BUCKETS, _oracle, embeddings, *parts)
    knowing, majority, by_length, linear = done
    assert [one.name for one in done] == [
        "predictor",
        "majority",
        "prompt length",
        "linear on embeddings",
    ]
    for rate in PROMISES:
        # Lengths are integers: one token more may give a miss rate of 0 instead of 5 %.
        assert all(one.missed[rate] < rate + 0.04 for one in done), rate
        assert knowing.reserved[rate] < min(majority.reserved[rate], by_length.reserved[rate])
    for other in (majority, by_length):
        assert other.evaluation.accuracy < 0.35
        assert other.evaluation.error_tokens > 2 * knowing.evaluation.error_tokens
    assert knowing.evaluation.accuracy == linear.evaluation.accuracy == 1.0
    figures = knowing.to_dict()
    assert figures["promises"]["0.1"]["missed"] == knowing.missed[0.1]


def test_its_own_calibration_is_measured():
    """A given calibration is not fitted again, however wrong; longer answers count as longest."""
    parts = split_in_three(examples(400), held_out=0.2)
    parts[2].extend([Example("w3", 1000)] * 5)
    wrong = Calibration(1.0, np.zeros(99))
    done = compare(BUCKETS, _oracle, prompt_lengths, *parts, calibration=wrong)
    assert done[0].missed[0.05] > 0.9 > done[1].missed[0.05]


def test_nothing_to_compare_on():
    """Each of the three parts must have examples."""
    with pytest.raises(ValueError, match="0 held out"):
        compare(BUCKETS, _oracle, prompt_lengths, examples(5), [], examples(5))
