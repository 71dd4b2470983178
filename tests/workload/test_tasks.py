"""The tasks of ExeGPT's table 3."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.tasks import TASKS, Lengths, task_items
from tests.common.tiers import some

# Table 3: (average, deviation, longest) of inputs; (average, deviation, 99th, longest) of outputs.
TABLE_3 = {
    "S": ((256, 252, 512), (32, 13, 63, 80)),
    "T": ((128, 81, 256), (128, 68, 292, 320)),
    "G": ((64, 23, 128), (192, 93, 417, 480)),
    "C1": ((256, 115, 512), (64, 30, 137, 160)),
    "C2": ((512, 252, 1024), (256, 134, 579, 640)),
}
# No distribution of that shape has the paper's deviation; these have the largest possible one.
UNIFORM_INPUTS = ("S", "T")


def _draw(name: str, num: int = 8000, **options):
    items = task_items(name, num, vocab_size=50, seed=3, **options)
    inputs = np.array([len(item.prompt_token_ids) for item in items])
    return items, inputs, np.array([item.num_output_tokens for item in items])


@pytest.mark.parametrize("name", some(TABLE_3))
def test_lengths_have_the_moments_of_the_table(name):
    """Averages, deviations, 99th percentiles and bounds are the paper's."""
    (mean, std, most), (out_mean, out_std, out_99th, out_most) = TABLE_3[name]
    items, inputs, outputs = _draw(name)
    assert inputs.mean() == pytest.approx(mean, rel=0.03)
    widest = np.arange(1, most + 1).std()
    assert (std > widest) == (name in UNIFORM_INPUTS)
    assert inputs.std() == pytest.approx(min(std, widest), rel=0.03)
    assert (inputs.min() >= 1, inputs.max() <= most) == (True, True)
    assert outputs.mean() == pytest.approx(out_mean, rel=0.03)
    assert outputs.std() == pytest.approx(out_std, rel=0.03)
    assert np.percentile(outputs, 99) == pytest.approx(out_99th, rel=0.03)
    assert (outputs.min() >= 1, outputs.max() <= out_most) == (True, True)
    assert {item.max_tokens for item in items} == {out_most}
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.05


@pytest.mark.parametrize("name", TABLE_3)
def test_exact_moments(name):
    """The distributions have the table's moments to a thousandth, and 99th percentiles to one."""
    for lengths in (TASKS[name].inputs, TASKS[name].outputs):
        values = np.arange(1, lengths.most + 1)
        p = lengths.probabilities()
        assert p.sum() == pytest.approx(1)
        if lengths.std < values.std():
            mean = p @ values
            assert mean == pytest.approx(lengths.mean, rel=1e-3)
            assert np.sqrt(p @ (values - mean) ** 2) == pytest.approx(lengths.std, rel=1e-3)
    out_99th = TABLE_3[name][1][2]
    p = TASKS[name].outputs.probabilities()
    assert 1 + np.searchsorted(p.cumsum(), 0.99) == pytest.approx(out_99th, abs=1)


def test_a_narrow_normal_is_left_as_it_is():
    """If the truncation has no effect, mean and deviation are those of the normal."""
    p = Lengths(50, 5, 100).probabilities()
    assert p[49] / p[54] == pytest.approx(np.exp(0.5), rel=1e-3)


def test_scale_multiplies_lengths():
    """The lengths and bounds are a tenth, for a short context; no length is 0."""
    items, inputs, outputs = _draw("C2", scale=0.1)
    assert inputs.mean() == pytest.approx(51.2, rel=0.03)
    assert outputs.mean() == pytest.approx(25.6, rel=0.03)
    assert (inputs.max() <= 102, outputs.max() <= 64) == (True, True)
    assert {item.max_tokens for item in items} == {64}
    tiny = _draw("S", num=100, scale=1e-4)[0]
    assert {(len(i.prompt_token_ids), i.num_output_tokens) for i in tiny} == {(1, 1)}


def test_a_seed_is_a_draw():
    """Equal seeds give equal items; all token ids are in the vocabulary."""
    one, two = (task_items("G", 20, vocab_size=7, seed=1) for _ in range(2))
    assert one == two
    assert one != task_items("G", 20, vocab_size=7, seed=2)
    assert {token for item in one for token in item.prompt_token_ids} == set(range(7))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("C3", {}, "pass one of S, T, G, C1, C2"),
        ("S", {"num": 0}, "num=0"),
        ("S", {"scale": 0.0}, "scale=0.0"),
        ("S", {"scale": float("nan")}, "scale=nan"),
    ],
)
def test_bad_tasks_are_refused(name, options, said):
    """The error lists the allowed values."""
    with pytest.raises(InvalidConfigError, match=said):
        _draw(name, **options)
