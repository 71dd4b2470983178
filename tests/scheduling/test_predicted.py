"""S3's packing, preemption and swapping, in cases computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.predictor import LengthBuckets, Refinement
from jaxserve.scheduling.admission import Predicted
from jaxserve.scheduling.order import LongestFirst
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.sequence import Phase, Sequence
from tests.scheduling.simulated import certain, engine_of, request_of

# Ten buckets of ten tokens.
BUCKETS = LengthBuckets.equal_width(100, 10)


def _config(num_tokens: int, num_host_pages: int = 100) -> EngineConfig:
    """Return a pool of this many tokens, with one token per page."""
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
    """Return a request whose predicted bucket ends at `predicted`, with probability 1."""
    params = dict(max_tokens=None, forced_length=actual or predicted)
    known = certain(predicted, BUCKETS)
    return request_of(name, tuple(range(1, prompt + 1)), prediction=known, **params)


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


def test_the_longest_go_first_with_all_that_fit_beside_them():
    """A pool of 100 tokens gets 65 and then 25, past 45 and 35; ORCA would not skip these."""
    lengths = {"a": 20, "b": 60, "c": 40, "d": 30}
    engine = engine_of("s3", _config(100))
    for name, predicted in lengths.items():
        engine.add(_request(name, predicted))
    assert _admitted(engine) == {"b", "d"}


def test_decreasing_first_fit_by_hand():
    """A pool of 100 packs the reservations 85 + 15 of 85, 45, 25, 15, 15; the rest waits."""
    engine = engine_of("s3", _config(100))
    for name, predicted in {"u": 10, "v": 40, "w": 80, "x": 20, "y": 10}.items():
        engine.add(_request(name, predicted))
    assert _admitted(engine) == {"w", "u"}
    assert engine.scheduler.page_usage().num_available == 0


def test_without_a_prediction_the_longest_answer_is_reserved():
    engine = engine_of("s3", _config(300))
    engine.add(request_of("a", max_tokens=None))
    engine.step()
    assert engine.scheduler.running[0].kv.table.reservation == 200


def test_a_sequence_that_outgrows_its_reservation_is_swapped_and_reserves_twice_as_much():
    """Reservations of 15, 30 and 60 give two preemptions, no recomputation and the same tokens."""
    request = _request("a", 10, actual=50)
    engine = engine_of("s3", _config(150))
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
    (alone,) = _run(engine_of("orca", _config(150)), [request])
    assert sequence.output == alone.output and len(sequence.output) == 50


def test_without_room_on_the_host_the_kv_is_computed_anew():
    request = _request("a", 10, actual=50)
    engine = engine_of("s3", _config(150, num_host_pages=20))
    (sequence,) = _run(engine, [request])
    assert engine.stats.num_pages_out == 15 and engine.stats.num_recomputed == 30
    (alone,) = _run(engine_of("orca", _config(150)), [request])
    assert sequence.output == alone.output


def test_right_predictions_preempt_no_sequence_and_fill_the_pool():
    """S3 runs more at once than ORCA, whose every reservation is the whole context."""
    requests = [_request(str(i), 10 * (1 + i % 3)) for i in range(24)]
    together = {}
    for policy in ("orca", "s3", "auto"):
        engine = engine_of(policy, _config(210))
        _run(engine, requests)
        together[policy] = max(step.num_running for step in engine.recorder.steps)
        assert engine.stats.num_preemptions == 0, policy
    assert together["orca"] == 1 and together["s3"] >= 6 and together["auto"] >= 6


def test_answers_that_end_one_after_the_other_need_less_than_their_sum():
    """Reservations of 65 and 25 exceed 80, but both never need that much at the same time."""
    engine = engine_of("auto", _config(80))
    for name, predicted in {"long": 60, "short": 20}.items():
        engine.add(_request(name, predicted))
    assert _admitted(engine) == {"long", "short"}
    s3 = engine_of("s3", _config(80))
    for name, predicted in {"long": 60, "short": 20}.items():
        s3.add(_request(name, predicted))
    assert _admitted(s3) == {"long"}


def test_decode_loops_end_where_answers_are_expected_to():
    """With waiting sequences, a loop is as long as the rest of the answer that ends first."""
    engine = engine_of("s3", _config(15))
    engine.add(_request("a", 10))
    engine.add(_request("b", 10))
    while engine.has_work:
        engine.step()
    loops = [step.num_iterations for step in engine.recorder.steps if step.kind == "decode loop"]
    # Only the position in the bucket is unknown: loops are short, but longer than one iteration.
    assert max(loops) > 1


# 30 tokens is the likeliest length of an answer; there is a reading every second token.
MARGINAL = np.asarray([0.1, 0.1, 0.3, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
REFINEMENT = Refinement(
    buckets=BUCKETS, marginal=MARGINAL, belief_weight=0.0, reading_weight=1.0, interval=2
)


def _probed(policy: str | Policy, remaining: int | None, num_tokens: int = 300) -> Engine:
    """Return a probe that always reads the bucket of this many remaining tokens; None: nothing."""
    logits = np.full(BUCKETS.num, np.nan)
    if remaining is not None:
        logits = 30.0 * np.eye(BUCKETS.num)[BUCKETS.bucket_of(remaining)]
    config = _config(num_tokens)
    return engine_of(policy, config, refinement=REFINEMENT, reading=lambda *_: logits)


def _unpredicted(name: str, actual: int) -> Request:
    return replace(_request(name, 10, actual=actual), prediction=None)


def _reservations(engine: Engine, sequence: Sequence) -> list[tuple[int, int]]:
    """Return (reserved tokens, output tokens planned before) of each admission."""
    seen: list[tuple[int, int]] = []
    num_admitted = 0
    while engine.has_work:
        before = sequence.num_planned_outputs
        engine.step()
        engine.scheduler.check_integrity()
        if sequence.phase is Phase.RUNNING and sequence.num_preemptions == num_admitted:
            num_admitted += 1
            seen.append((sequence.kv.table.reservation, before))
    return seen


def test_with_only_a_probe_the_usual_length_is_reserved_at_first():
    """It is the prompt and the likeliest bucket of all answers: 35 tokens; ORCA reserves 200."""
    engine = _probed("s3", None)
    (sequence,) = engine.add(_unpredicted("a", 30))
    assert _reservations(engine, sequence) == [(35, 0)]
    assert engine.stats.num_preemptions == 0
    engine = _probed("s3", None, num_tokens=140)
    for name in "abcd":
        engine.add(_unpredicted(name, 30))
    assert _admitted(engine) == set("abcd")


def test_with_a_probe_the_next_reservation_is_what_was_read_where_that_is_more_than_twice():
    """It is 35 tokens first; then the prompt and 30 + 90 of the answer, not only 70."""
    engine = _probed("s3", 90)
    (sequence,) = engine.add(_unpredicted("a", 95))
    (first, second) = _reservations(engine, sequence)
    assert first == (35, 0)
    reserved, planned = second
    newest_read = reserved - 5 - 90
    assert planned == 31 and planned - 3 <= newest_read < planned
    (alone,) = _run(engine_of("orca", _config(300)), [_unpredicted("a", 95)])
    assert sequence.output == alone.output


@pytest.mark.parametrize("interval", [1, 2, 16])
def test_readings_that_are_always_too_short_preempt_a_logarithm_of_times(interval):
    """Reservations double nevertheless: 35, 70, 140."""
    logits = 30.0 * np.eye(BUCKETS.num)[0]
    refinement = replace(REFINEMENT, interval=interval)
    engine = engine_of("s3", _config(300), refinement=refinement, reading=lambda *_: logits)
    (sequence,) = engine.add(_unpredicted("a", 120))
    reserved = [tokens for tokens, _ in _reservations(engine, sequence)]
    assert reserved == [35, 70, 140]
    assert sequence.num_preemptions <= math.log2(200 / 35)


def test_a_reservation_counts_from_the_newest_reading():
    """A preempted sequence has a reservation at a miss rate, after readings of 50 more tokens."""
    policy = Policy(
        "promised",
        Predicted(miss_rate=0.5),
        LongestFirst(Predicted(miss_rate=0.5)),
        PRESETS["s3"].iteration,
        PRESETS["s3"].retention,
        PRESETS["s3"].preemption,
    )
    engine = _probed(policy, 50)
    (sequence,) = engine.add(_unpredicted("a", 70))
    (first, second) = _reservations(engine, sequence)
    # Half of all answers have at most 30 tokens.
    assert first[0] == 5 + 30
    reserved, planned = second
    # 41 to 50 more than at the reading, equally likely: half of them have at most 45. That is more
    # than twice the first reservation.
    assert planned - 3 <= reserved - 5 - 45 < planned and reserved > 2 * first[0]


def test_packing_goes_by_what_was_reserved_when_a_sequence_began_to_wait():
    """A preempted sequence with a long reading precedes others; its key stays while it runs."""
    engine = _probed("s3", 100, num_tokens=200)
    (early,) = engine.add(_unpredicted("early", 90))
    keys = engine.scheduler.order_keys
    before = keys.of(early)
    while not early.num_preemptions:
        assert keys.of(early) == before
        engine.step()
    engine.add(_unpredicted("late", 30))
    assert keys.of(early) < before
    assert next(iter(engine.scheduler.waiting)) is early or early.phase is Phase.RUNNING
