"""Length distributions, and the decode phases that they fill."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.schedules import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.rra import NUM_PARTS, DecodePhases
from jaxserve.predictor import LengthBuckets, LengthDistributions
from jaxserve.workload.tasks import TASKS
from tests.planning.schedules.made_up import always

pytestmark = pytest.mark.fast

# Half of the answers take one iteration, half of them three.
ONE_OR_THREE = LengthDistribution.of_samples([1, 3])


def paper_ending(iterations: LengthDistribution, num_decodes: int) -> np.ndarray:
    """Return the paper's P_D(U): the share of a decode batch that ends in iteration U of a phase.

    An answer of S iterations ends with probability 1 / ceil(S / N_D), in iteration
    1 + (S - 1 mod N_D) (section 6 of ExeGPT). This takes S of the answers in the batch as S of new
    answers, although long ones are in more batches.
    """
    lengths = np.arange(1, iterations.max_length + 1)
    shares = iterations.probabilities[1:] / -(-lengths // num_decodes)
    return np.bincount((lengths - 1) % num_decodes, shares, minlength=num_decodes)


def resident(iterations: LengthDistribution, num_decodes: int) -> np.ndarray:
    """Return the sequences in iterations 1 ... N_D of a phase, per new sequence a phase."""
    return _folded(iterations.survival[1:], num_decodes)


def resident_tokens(iterations: LengthDistribution, num_decodes: int) -> np.ndarray:
    """Return the output tokens of the sequences that `resident` counts."""
    positions = np.arange(1, iterations.max_length + 1)
    return _folded(iterations.survival[1:] * positions, num_decodes)


def _folded(values: np.ndarray, num_columns: int) -> np.ndarray:
    """Return the sums of every `num_columns`-th value, by column."""
    padded = np.zeros(max(1, -(-len(values) // num_columns)) * num_columns)
    padded[: len(values)] = values
    return padded.reshape(-1, num_columns).sum(0)


def test_moments_and_percentiles_of_samples():
    """Lengths 1 and 3: mean 2, mean square 5, and tokens at positions 1, 1, 2 and 3."""
    assert ONE_OR_THREE.mean == pytest.approx(2.0)
    assert ONE_OR_THREE.mean_square == pytest.approx(5.0)
    assert ONE_OR_THREE.mean_position == pytest.approx(7 / 4)
    assert [ONE_OR_THREE.percentile(level) for level in (0.01, 0.5, 0.51, 0.99)] == [1, 1, 3, 3]
    np.testing.assert_allclose(ONE_OR_THREE.survival, [1.0, 1.0, 0.5, 0.5])
    np.testing.assert_allclose(ONE_OR_THREE.less_one().probabilities, [0.5, 0.0, 0.5])
    assert always(0).less_one().mean == 0.0


@pytest.mark.parametrize(
    ("task", "mean", "p99"), [("S", 32, 63), ("T", 128, 292), ("G", 192, 417), ("C1", 64, 137)]
)
def test_tasks_have_the_means_and_percentiles_of_table_3(task: str, mean: float, p99: int):
    """The paper's 99th percentiles come out of mean, deviation and maximum, within 2 %."""
    outputs = TaskLengths.of_task(TASKS[task]).outputs
    assert outputs.mean == pytest.approx(mean, rel=0.005)
    assert outputs.percentile(0.99) == pytest.approx(p99, rel=0.02)


def test_predicted_distributions_are_mixed():
    """Two sequences: one in (0, 2], the other with equal odds in (0, 2] and (2, 3]."""
    predicted = LengthDistributions(LengthBuckets((0, 2, 3)), np.array([[1.0, 0.0], [0.5, 0.5]]))
    mixed = LengthDistribution.of_predictions(predicted)
    np.testing.assert_allclose(mixed.probabilities, [0.0, 0.375, 0.375, 0.25])


@pytest.mark.parametrize("given", [[], [-1.0, 2.0], [0.0, 0.0], [float("nan")], [[1.0]]])
def test_weights_that_are_no_distribution_are_refused(given: list):
    with pytest.raises(InvalidConfigError, match="not allowed"):
        LengthDistribution(np.array(given))


@pytest.mark.parametrize("lengths", [[], [3, -1]])
def test_samples_without_lengths_are_refused(lengths: list[int]):
    with pytest.raises(InvalidConfigError, match="observed"):
        LengthDistribution.of_samples(lengths)


def test_the_papers_share_that_ends_in_an_iteration():
    """N_D = 2: length 1 ends in U = 1; length 3 with odds 1/2, in U = 1 + (2 mod 2) = 1."""
    np.testing.assert_allclose(paper_ending(ONE_OR_THREE, 2), [0.5 + 0.25, 0.0])
    # N_D = 3 ends both in their only phase; N_D = 1 in one phase of one, and of three.
    np.testing.assert_allclose(paper_ending(ONE_OR_THREE, 3), [0.5, 0.0, 0.5])
    np.testing.assert_allclose(paper_ending(ONE_OR_THREE, 1), [0.5 + 0.5 / 3])


def test_resident_sequences_by_hand():
    """N_D = 2: iteration 1 has all of this phase's and half of the last one's, iteration 2 half."""
    np.testing.assert_allclose(resident(ONE_OR_THREE, 2), [1.5, 0.5])
    # Tokens: the new ones are at position 1, then the long ones at 2; older ones at 3.
    np.testing.assert_allclose(resident_tokens(ONE_OR_THREE, 2), [1 + 0.5 * 3, 0.5 * 2])


def test_the_papers_decode_batch_is_exact_only_if_all_take_equally_many_phases():
    """B_E / sum of P_D(U): 4/3 in place of 3/2 for one or two phases, equal for two phases."""
    assert 1 / paper_ending(ONE_OR_THREE, 2).sum() == pytest.approx(4 / 3)
    two_phases = LengthDistribution.of_samples([3, 4])
    assert 1 / paper_ending(two_phases, 2).sum() == pytest.approx(resident(two_phases, 2)[0])


@pytest.mark.parametrize("num_decodes", [1, 3, 7, 20, 64])
def test_a_steady_state_of_sampled_answers_has_the_expected_batches(num_decodes: int):
    """A batch that takes 40 new answers a round and drops ended ones: batches and tokens."""
    iterations = TaskLengths.of_task(TASKS["S"]).outputs
    rng = np.random.default_rng(7)
    num_warm, num_new = -(-iterations.max_length // num_decodes), 40
    num_rounds = 300 + num_warm
    lengths = done = np.zeros(0, int)
    active, tokens = np.zeros(num_decodes), np.zeros(num_decodes)
    for number in range(num_rounds):
        new = rng.choice(iterations.max_length + 1, num_new, p=iterations.probabilities)
        lengths, done = np.append(lengths, new), np.append(done, np.zeros(num_new, int))
        for u in range(num_decodes):
            done = done + 1
            if number >= num_warm:
                active[u] += len(done) / num_new / (num_rounds - num_warm)
                tokens[u] += done.sum() / num_new / (num_rounds - num_warm)
            lengths, done = lengths[done < lengths], done[done < lengths]
    expected = resident(iterations, num_decodes)
    assert expected.sum() == pytest.approx(iterations.mean)
    assert (np.diff(expected) <= 1e-12).all()
    np.testing.assert_allclose(active, expected, rtol=0.03, atol=0.02)
    np.testing.assert_allclose(tokens, resident_tokens(iterations, num_decodes), rtol=0.05, atol=1)
    # The paper's batch is at most as large, by Jensen's inequality.
    assert 1 / paper_ending(iterations, num_decodes).sum() <= expected[0] + 1e-9


def test_phases_hold_means_peaks_and_minima():
    """N_D = 2 with inputs of 10: parts of half an iteration, and KV of 1.5 and 0.5 sequences."""
    phases = DecodePhases.of(10.0, ONE_OR_THREE)
    np.testing.assert_allclose(phases.batch[2], [1.5, 1.5, 0.5, 0.5])
    np.testing.assert_allclose(phases.length[2, [0, 3]], [10 + 2.5 / 1.5, 10 + 2.0])
    assert phases.peak_tokens[2] == pytest.approx(15 + 2.5)
    assert phases.peak_sequences[2] == pytest.approx(1.5)
    for num_decodes in (1, 2, 3):
        mean = phases.batch[num_decodes].sum() / NUM_PARTS * num_decodes
        assert mean == pytest.approx(ONE_OR_THREE.mean)
    first = np.array([1, 2])
    most = np.array([2, 3])
    least = phases.least_peak_tokens(first, most)
    np.testing.assert_allclose(least, [min(phases.peak_tokens[1:3]), min(phases.peak_tokens[2:4])])
    np.testing.assert_allclose(phases.least_batch(first, most)[1], phases.batch[2:4].min(0))


@pytest.mark.parametrize("longest", [1, 2, 5, 37, 200])
def test_phases_of_every_length_are_those_of_the_sums(longest: int):
    """Random distributions: means of four parts, peaks and first batches for every N_D."""
    rng = np.random.default_rng(longest)
    weights = rng.random(longest + 1) * (rng.random(longest + 1) < 0.4)
    weights[longest] += 0.01
    iterations = LengthDistribution(weights)
    phases = DecodePhases.of(30.0, iterations)
    at_once = 30.0 * iterations.probabilities[0]
    for num_decodes in range(1, longest + 1):
        sequences = resident(iterations, num_decodes)
        held = 30.0 * sequences + resident_tokens(iterations, num_decodes)
        fine = np.repeat(np.stack([sequences, held]), NUM_PARTS, axis=1)
        batch, tokens = fine.reshape(2, NUM_PARTS, num_decodes).mean(2)
        np.testing.assert_allclose(phases.batch[num_decodes], batch, atol=1e-12)
        np.testing.assert_allclose(phases.length[num_decodes] * batch, tokens, rtol=1e-9)
        assert phases.first_batch[num_decodes] == pytest.approx(sequences[0])
        assert phases.peak_tokens[num_decodes] == pytest.approx(held.max() + at_once)


def test_peaks_of_long_phases_are_at_most_those_of_neighbours():
    """From 512 iterations on: within a percent below their own, and not above all within 1 %."""
    longest = 1500
    weights = np.zeros(longest + 1)
    for length in np.random.default_rng(0).lognormal(5, 1, 200).astype(int):
        weights[min(longest, length)] += 1
    iterations = LengthDistribution(weights + (np.arange(longest + 1) == longest))
    found = DecodePhases.of(30.0, iterations).peak_tokens[1:]
    exact = []
    for each in range(1, longest + 1):
        held = 30.0 * resident(iterations, each) + resident_tokens(iterations, each)
        exact.append(held.max() + 30.0 * iterations.probabilities[0])
    np.testing.assert_allclose(found[:512], exact[:512])
    for i in range(512, longest):
        near = exact[int(0.99 * i) - 1 : int(1.01 * i) + 3]
        assert 0.99 * exact[i] <= found[i] <= max(near) * (1 + 1e-9)


def test_answers_of_one_token_need_memory_but_no_iteration():
    """A third of the answers end with the prompt: two thirds decode, all hold their input."""
    phases = DecodePhases.of(10.0, LengthDistribution.of_samples([0, 1, 1]))
    assert phases.batch[1, 0] == pytest.approx(2 / 3)
    assert phases.peak_sequences[1] == pytest.approx(1.0)
    assert phases.peak_tokens[1] == pytest.approx(10.0 + 2 / 3)
