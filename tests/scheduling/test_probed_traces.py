"""Random traces with a probe that is right, wrong or silent have the same tokens and progress."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.execution.simulated import END_TOKEN
from jaxserve.predictor import LengthBuckets, Refinement
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless
from jaxserve.scheduling.sequence import Phase
from jaxserve.testing import Trace
from jaxserve.testing.traces import PROBES
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, request_of
from tests.scheduling.test_traces import PREDICTED

AUTO = PRESETS["auto"]
S3 = PRESETS["s3"]
QUANTILES = next(policy for policy in PREDICTED if policy.name == "quantiles")


CASES = [(AUTO, "any", 20)]
CASES += [(AUTO, probe, 25) for probe in PROBES]
CASES += [(policy, "any", 50) for policy in (AUTO, QUANTILES, S3)]
CASES += [(AUTO, "misshapen", 25)]


@pytest.mark.release
@pytest.mark.parametrize(
    "policy, probe, count", some(CASES), ids=lambda value: getattr(value, "name", str(value))
)
def test_readings_never_change_a_token(policy, probe, count):
    """This holds for any reading and prediction, with preemptions and cancellations."""
    num_refined = 0
    for seed in range(count):
        trace = Trace(seed, with_faults=seed % 2 == 0, probe=probe)
        trace.check(policy, cancel_rate=0.02 if seed % 3 else 0.0)
        num_refined += trace.num_refined
    assert (num_refined > 0) == (probe not in ("misshapen", "nan"))


@pytest.mark.release
@seeds(30, 10)
def test_resized_pools_serve_on(seeds):
    """Preempted sequences keep their readings."""
    for seed in seeds:
        trace = Trace(seed, probe="any")
        together = trace.run(AUTO, resize_rate=0.15)
        for key, wanted in trace.expected().items():
            assert together[key].output == wanted.output[: len(together[key].output)]


CONFIG = EngineConfig(
    page_size=4,
    num_pages=121,
    max_slots=32,
    max_context=256,
    max_step_tokens=64,
    max_decode_iterations=4,
    num_host_pages=400,
)
NUM_ANSWERS = 120
BUCKETS = LengthBuckets.logarithmic(128, 7)
MIDDLES = np.log(BUCKETS.middle(np.arange(BUCKETS.num)))


def _served(policy: Policy, noise: float | None, seed: int = 0) -> tuple[int, int]:
    """Return iterations and preemptions of 120 answers, whose length distribution is known.

    Args:
      noise: standard deviation of the logarithm of the readings; None for no readings.
      seed: of the lengths, and of the readings' errors.
    """
    random = np.random.default_rng(1000 + seed)
    lengths = np.random.default_rng(seed).integers(1, 129, NUM_ANSWERS)
    marginal = np.bincount(BUCKETS.bucket_of(lengths), minlength=BUCKETS.num) / NUM_ANSWERS

    def reading(request: Request, sample: int, elapsed: int) -> np.ndarray:
        if noise is None:
            return np.full(BUCKETS.num, np.nan)
        left = max(1, lengths[int(request.id)] - elapsed)
        at = np.log(left) + noise * random.normal()
        return -0.5 * ((MIDDLES - at) / 0.5) ** 2

    engine = engine_of(
        policy,
        CONFIG,
        answer_length=lambda request, _: int(lengths[int(request.id)]),
        refinement=Refinement(buckets=BUCKETS, marginal=marginal, belief_weight=0.5, interval=4),
        reading=reading,
        reads_context=False,
    )
    for i in range(NUM_ANSWERS):
        request = request_of(str(i), (1,) * 8, max_tokens=None)
        engine.add(replace(request, stop_token_ids=(END_TOKEN,)))
    while engine.has_work:
        engine.step()
    return engine.stats.num_iterations, engine.scheduler.counters()["num_preemptions"]


@pytest.mark.release
def test_readings_make_better_schedules():
    """They need fewer iterations and no more preemptions, on average over eight draws.

    A single draw has 10 to 30 preemptions, more or fewer with readings that have errors.
    """
    # No pages are cached, so that the cost of a preemption does not depend on the cache.
    policy = replace(AUTO, retention=Stateless())

    def mean(noise: float | None) -> list[float]:
        return np.mean([_served(policy, noise, seed) for seed in range(8)], axis=0).tolist()

    iterations, preemptions = mean(None)
    for noise in (0.0, 0.2):
        own_iterations, own_preemptions = mean(noise)
        # 95 % of what draws without readings took while admission kept one standard deviation.
        assert own_iterations < 0.95 * 1190, (noise, own_iterations)
        assert own_iterations < 0.98 * iterations, (noise, own_iterations, iterations)
        assert own_preemptions <= preemptions, (noise, own_preemptions, preemptions)


@pytest.mark.release
def test_a_probe_alone_lets_s3_reserve_less_than_all():
    """It needs far fewer iterations than reservations of the longest answer, and no preemptions."""
    longest, _ = _served(PRESETS["orca"], None)
    for noise in (None, 0.2):
        iterations, preemptions = _served(S3, noise)
        assert iterations < 0.4 * longest and preemptions == 0, (noise, iterations, longest)


def test_a_reading_is_of_the_time_before_its_token():
    """The estimate is of the position that was read; the next reading is an interval later."""
    trace = Trace(0, probe="truth")
    request = replace(
        trace.requests[0], params=SamplingParams(max_tokens=20), prompt=(1, 2), prediction=None
    )
    engine = trace.engine(AUTO, replace(trace.config, max_decode_iterations=1))
    [sequence] = engine.add(request)
    lengths = engine.scheduler.lengths
    first = lengths.estimate(sequence)
    assert first is not None
    seen = []
    while engine.has_work:
        engine.step()
        newest = lengths.estimate(sequence)
        if newest is not None and newest is not first and sequence.phase is Phase.RUNNING:
            seen.append((len(sequence.output), newest.at))
    assert seen[0] == (1, 0)
    assert all(at % 3 == 0 and 0 <= count - at - 1 < 3 for count, at in seen), seen
