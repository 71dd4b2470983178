"""S3's packing, preemption and swapping, on cases worked out by hand."""

from __future__ import annotations

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.sequence import Phase, Sequence
from predictor import LengthBuckets

# Ten buckets of ten tokens.
BUCKETS = LengthBuckets.equal_width(100, 10)


def _config(num_tokens: int, num_host_pages: int = 100) -> EngineConfig:
    """A pool of so many tokens, a page each."""
    return EngineConfig(
        page_size=1,
        num_pages=1 + num_tokens,
        max_slots=8,
        max_context=200,
        max_step_tokens=64,
        max_decode_iterations=4,
        num_host_pages=num_host_pages,
    )


def _request(name: str, predicted: int, *, prompt: int = 5, actual: int | None = None) -> Request:
    """Its answer falls surely into the bucket that ends with `predicted`."""
    probabilities = np.zeros(BUCKETS.num)
    probabilities[predicted // 10 - 1] = 1.0
    return Request(
        id=name,
        prompt=tuple(range(1, prompt + 1)),
        params=SamplingParams(max_tokens=None, forced_length=actual or predicted),
        arrival_s=0.0,
        prediction=LengthPrediction(BUCKETS, probabilities),
    )


def _engine(policy: str | Policy, config: EngineConfig) -> Engine:
    clock = VirtualClock()
    chosen = PRESETS[policy] if isinstance(policy, str) else policy
    return Engine(SimulatedExecutor(config, clock), chosen, clock)


def _run(engine: Engine, requests: list[Request]) -> list[Sequence]:
    sequences = [sequence for request in requests for sequence in engine.add(request)]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        usage = engine.scheduler.page_usage()
        assert usage.num_owned + usage.num_reserved <= usage.num_usable
    return sequences


def _admitted(engine: Engine) -> set[str]:
    engine.step()
    return {sequence.request.id for sequence in engine.scheduler.running}


def test_the_longest_go_first_and_whoever_fits_beside_them():
    """100 tokens: 65 and then, past 45 and 35 that do not fit, 25; ORCA would not look past."""
    lengths = {"a": 20, "b": 60, "c": 40, "d": 30}
    engine = _engine("s3", _config(100))
    for name, predicted in lengths.items():
        engine.add(_request(name, predicted))
    assert _admitted(engine) == {"b", "d"}


def test_decreasing_first_fit_by_hand():
    """A bin of 100: reservations 85, 45, 25, 15, 15 pack as 85 + 15; the rest wait."""
    engine = _engine("s3", _config(100))
    for name, predicted in {"u": 10, "v": 40, "w": 80, "x": 20, "y": 10}.items():
        engine.add(_request(name, predicted))
    assert _admitted(engine) == {"w", "u"}
    assert engine.scheduler.page_usage().num_available == 0


def test_without_a_prediction_the_longest_answer_is_reserved():
    """As ORCA does."""
    engine = _engine("s3", _config(300))
    request = _request("a", 10)
    engine.add(
        Request(
            id="a", prompt=request.prompt, params=SamplingParams(max_tokens=None), arrival_s=0.0
        )
    )
    engine.step()
    assert engine.scheduler.running[0].kv.table.reservation == 200


def test_who_outgrows_a_reservation_goes_to_the_host_and_comes_back_with_twice_as_much():
    """15 tokens, then 30, then 60: two preemptions, nothing computed anew, the same tokens."""
    request = _request("a", 10, actual=50)
    engine = _engine("s3", _config(150))
    (sequence,) = engine.add(request)
    reserved = []
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        if sequence.phase is Phase.RUNNING and sequence.kv.table.reservation not in reserved:
            reserved.append(sequence.kv.table.reservation)
    assert reserved == [15, 30, 60]
    stats = engine.stats
    assert (stats.num_preemptions, stats.num_outgrown, stats.num_recomputed) == (2, 2, 0)
    assert stats.num_pages_out == stats.num_pages_in == 15 + 30
    (alone,) = _run(_engine("orca", _config(150)), [request])
    assert sequence.output == alone.output and len(sequence.output) == 50


def test_without_room_on_the_host_the_kv_is_computed_anew():
    """The tokens are the same."""
    request = _request("a", 10, actual=50)
    engine = _engine("s3", _config(150, num_host_pages=20))
    (sequence,) = _run(engine, [request])
    assert engine.stats.num_pages_out == 15 and engine.stats.num_recomputed == 30
    (alone,) = _run(_engine("orca", _config(150)), [request])
    assert sequence.output == alone.output


def test_right_predictions_preempt_nobody_and_fill_the_pool():
    """S3 has more at once than ORCA, whose every reservation is the whole context."""
    requests = [_request(str(i), 10 * (1 + i % 3)) for i in range(24)]
    together = {}
    for policy in ("orca", "s3", "auto"):
        engine = _engine(policy, _config(210))
        _run(engine, requests)
        together[policy] = max(step.num_running for step in engine.recorder.steps)
        assert engine.stats.num_preemptions == 0, policy
    assert together["orca"] == 1 and together["s3"] >= 6 and together["auto"] >= 6


def test_answers_that_end_one_after_the_other_need_less_than_their_sum():
    """Reservations of 65 and 25 are more than 80, but at no time do both need that much."""
    engine = _engine("auto", _config(80))
    for name, predicted in {"long": 60, "short": 20}.items():
        engine.add(_request(name, predicted))
    assert _admitted(engine) == {"long", "short"}
    s3 = _engine("s3", _config(80))
    for name, predicted in {"long": 60, "short": 20}.items():
        s3.add(_request(name, predicted))
    assert _admitted(s3) == {"long"}


def test_decode_loops_end_where_answers_are_expected_to():
    """With others waiting, a loop is as long as what is left of the answer that ends first."""
    engine = _engine("s3", _config(15))
    engine.add(_request("a", 10))
    engine.add(_request("b", 10))
    while engine.has_work:
        engine.step()
    loops = [step.num_iterations for step in engine.recorder.steps if step.kind == "decode loop"]
    # Uncertain within its bucket only: short loops, but more than one iteration at the start.
    assert max(loops) > 1
