"""The variant of a step that serves a request, which does not affect its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig, fine_slot_buckets
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.sampler import SamplingNeeds, Variant
from tests.common.tiers import some
from tests.steps.sampling import CONTEXT, NUM_ROWS, VOCAB, num_traces, random_requests, request, run

GREEDY, RANDOM, FULL = Variant


@pytest.mark.parametrize("seed", some(range(8), 0, 1))
def test_a_rows_token_is_the_same_in_every_variant_that_serves_it(seed):
    """The tokens are equal whether other requests need the cheapest or the costliest variant.

    Rows that a variant does not serve are in the same batch and do not affect the others.
    """
    rng = np.random.default_rng(seed)
    simple = [
        request(seed=i, temperature=float(rng.choice([0.0, 0.7, 1.5])), top_k=i % 4 * 40)
        for i in range(NUM_ROWS // 2)
    ]
    requests = [*simple, *random_requests(rng, NUM_ROWS - len(simple), VOCAB)]
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32) * 2
    logits = np.round(logits) if seed % 2 else logits  # equal logits
    logits[rng.integers(NUM_ROWS), rng.integers(VOCAB)] = rng.choice([np.nan, np.inf])
    tokens = rng.integers(0, VOCAB, (NUM_ROWS, CONTEXT), np.int32)
    length = rng.integers(8, CONTEXT, NUM_ROWS)
    got = {
        variant: run(logits, requests, tokens=tokens, length=length, variant=variant)
        for variant in Variant
    }
    needed = np.array([SamplingNeeds.of(each.params).variant for each in requests])
    assert set(needed) == set(Variant)
    for variant in (GREEDY, RANDOM):
        served = needed <= variant
        np.testing.assert_array_equal(got[variant].token[served], got[FULL].token[served])
        np.testing.assert_array_equal(got[variant].finite[served], got[FULL].finite[served])


def test_each_variant_is_one_executable():
    """No request compiles an executable; only FULL returns log-probabilities."""
    rng = np.random.default_rng(10)
    logits = rng.normal(size=(NUM_ROWS, VOCAB))
    for variant in Variant:
        run(logits, [request()] * NUM_ROWS, variant=variant)
    before = dict(num_traces)
    for _ in range(5):
        requests = random_requests(rng, NUM_ROWS, VOCAB)
        for variant in Variant:
            got = run(logits, requests, variant=variant)
            assert (got.logprob is None) == (variant is not FULL)
            assert (got.top_logprobs is None) == (variant is not FULL)
    assert dict(num_traces) == before


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        (dict(), GREEDY),
        (dict(top_k=5, top_p=0.5, min_p=0.1, seed=3), GREEDY),
        (dict(prompt_logprobs=2), GREEDY),
        (dict(temperature=0.1), RANDOM),
        (dict(temperature=1, top_k=5, top_p=0.5, min_p=0.1), RANDOM),
        (dict(repetition_penalty=1.1), FULL),
        (dict(presence_penalty=0.1), FULL),
        (dict(frequency_penalty=-0.1), FULL),
        (dict(logit_bias={3: 1.0}), FULL),
        (dict(min_tokens=1), FULL),
        (dict(logprobs=0), FULL),
        (dict(temperature=1, logprobs=3), FULL),
    ],
)
def test_what_a_request_needs(params, variant):
    """It is the cheapest variant that supports the parameters."""
    needs = SamplingNeeds.of(SamplingParams(**params))
    assert needs.variant is variant
    assert needs.logprobs == ("logprobs" in params)
    assert needs.top_logprobs == (params.get("logprobs", 0) > 0)


def test_what_several_requests_need():
    """It is the costliest of their variants, and all log-probabilities that one of them returns."""
    random, biased, scored = (
        SamplingNeeds.of(SamplingParams(**params))
        for params in (dict(temperature=1), dict(logit_bias={3: 1.0}), dict(logprobs=0))
    )
    assert SamplingNeeds.union([]) == SamplingNeeds(GREEDY)
    assert SamplingNeeds.union([random, SamplingNeeds()]) == SamplingNeeds(RANDOM)
    assert SamplingNeeds.union([random, biased]) == SamplingNeeds(FULL)
    assert SamplingNeeds.union([scored, random]) == SamplingNeeds(FULL, logprobs=True)


def test_costly_variants_have_few_sizes():
    """The largest size is included, so that every step is served; there are under half as many."""
    assert RANDOM.sizes(fine_slot_buckets(32)) == FULL.sizes(fine_slot_buckets(32)) == (8, 32)
    large = EngineConfig(num_pages=9, max_slots=256)
    assert RANDOM.sizes(large.slot_buckets) == (16, 64, 256)
    assert RANDOM.sizes(large.head_buckets) == (4, 32, 256)
    assert RANDOM.sizes((1, 4)) == (4,)
    assert RANDOM.sizes((1,)) == (1,)
    for max_slots in range(1, 300):
        buckets = EngineConfig(num_pages=9, max_slots=max_slots).slot_buckets
        assert GREEDY.sizes(buckets) == buckets
        sizes = RANDOM.sizes(buckets)
        assert sizes[-1] == max_slots and len(sizes) <= 3 and set(sizes) <= set(buckets)
