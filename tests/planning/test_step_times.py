"""Step times: interpolation between measured points, and saved files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jaxserve.core.errors import InvalidProfileError
from jaxserve.execution.step_cost import StepWork
from jaxserve.planning import StepTimes
from jaxserve.planning.step_times import Curve
from jaxserve.scheduling.plan import Row
from tests.planning.step_times import CONFIG, made_up, plan

pytestmark = pytest.mark.fast


def test_a_curve_is_straight_between_and_beyond_its_points():
    """It is not below zero, however steep the line is."""
    curve = Curve(((10.0, 1.0), (20.0, 3.0), (40.0, 4.0)))
    assert [curve(x) for x in (10, 15, 20, 30, 40)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert [curve(x) for x in (8, 60)] == pytest.approx([0.6, 5.0])
    assert curve(0) == 0.0
    assert Curve(((5.0, 2.0),))(1e9) == 2.0
    with pytest.raises(InvalidProfileError, match="must increase"):
        Curve(((2.0, 1.0), (2.0, 1.0)))


def test_a_decode_loop_costs_its_iterations():
    """Each iteration costs by its rows' positions; the loop itself and edits are added."""
    times = made_up()
    rows = (Row(0, 0, 99, 1, True), Row(1, 1, 199, 1, True))
    loop = plan(rows, num_iterations=4, window_size=4, moves=((5, 1),), releases=(5,))
    two = times.device_s(StepWork(loop, 0, (300, 302)))
    assert two == pytest.approx(4.25 + (4 + 0.6) + (4 + 0.604) + 0.5 + 0.125)
    assert times.device_s(StepWork(loop, 0, ())) == pytest.approx(4.25 + 0.5 + 0.125)
    assert times.host_s(loop) == pytest.approx(0.03)


def test_a_mixed_step_costs_its_bucket_its_attention_and_its_head():
    """It has the body of 128 tokens and the head of 8 rows; rows of one token count as decode."""
    times = made_up()
    assert (CONFIG.token_buckets, CONFIG.head_buckets) == ((64, 128), (8,))
    rows = (Row(0, 0, 0, 80, True), Row(1, 1, 499, 1, True))
    cost = times.device_s(StepWork(plan(rows), 3240, (500,)))
    assert cost == pytest.approx(128 + 3.24 + 1.0 + 0.5)
    rows = (Row(0, 0, 0, 20, False),)
    assert times.device_s(StepWork(plan(rows), 210, (0,))) == pytest.approx(64 + 0.21)


def test_an_encoder_is_a_part_of_a_mixed_step():
    """Two prompts of 30 and 40 tokens, and a decoder's token: 128 and 64 are the sizes."""
    times = made_up(replace(CONFIG, has_encoder=True))
    prompts = (Row(0, 0, 0, 30, 0, encodes=True), Row(1, 1, 0, 40, 0, encodes=True))
    encoder_s = 64 + (30**2 + 40**2) / 2000
    alone = plan(prompts)
    assert times.device_s(StepWork(alone, 0, ())) == pytest.approx(encoder_s)
    mixed = plan((*prompts, Row(0, 0, 32, 1, 1)))
    cost = times.device_s(StepWork(mixed, 0, (33,)))
    assert cost == pytest.approx(encoder_s + 64 + 8 * 33 / 4000 + 0.5)


def test_a_file_gives_back_what_was_saved(tmp_path):
    """The file is readable JSON, equals the saved table, and is accepted where it was measured."""
    times, path = made_up(), tmp_path / "new" / "times.json"
    times.save(path)
    assert json.loads(path.read_text())["origin"]["device"]["host_cpu"] == "an abacus"
    read = StepTimes.load(path, expected=times.origin)
    assert replace(read, origin=times.origin) == times
    assert read.origin.config == times.origin.config
    more_pages = replace(times.origin, config=replace(CONFIG, num_pages=77))
    assert StepTimes.load(path, expected=more_pages).head_s == times.head_s


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model": {"num_layers": 3, "dtype": "float32"}}, "model.num_layers is 2, not 3"),
        ({"device": {"platform": "cpu", "host_cpu": "a slide rule"}}, "an abacus"),
        ({"config": replace(CONFIG, page_size=16)}, "page_size is 8, not 16"),
        ({"config": replace(CONFIG, max_slots=4, slot_buckets=(), head_buckets=())}, "slot_b"),
    ],
)
def test_step_times_of_something_else_are_refused(tmp_path, change, said):
    """The error names the model, device or compiled size, with both values."""
    times = made_up()
    times.save(tmp_path / "times.json")
    here = replace(times.origin, **change)
    with pytest.raises(InvalidProfileError, match=said):
        StepTimes.load(tmp_path / "times.json", expected=here)
    with pytest.raises(InvalidProfileError, match="measure again"):
        StepTimes.median([times, replace(times, origin=here)])


@pytest.mark.parametrize("text", ["", "[]", '{"origin": {}}', '{"decode_s": {}}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    """A missing file is refused too."""
    path = tmp_path / "times.json"
    with pytest.raises(InvalidProfileError, match="FileNotFoundError"):
        StepTimes.load(path)
    path.write_text(text)
    with pytest.raises(InvalidProfileError, match="does not hold step times"):
        StepTimes.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan_s": float("nan")},
        {"submit_s": -1.0},
        {"edit_s": float("inf")},
        {"move_s": "1"},
        {"admit_s": True},
        {"page_in_s": 10**400},
        {"head_s": {8: -0.5}},
        {"decode_s": dict.fromkeys(CONFIG.slot_buckets, Curve(((0.0, float("nan")),)))},
        {"decode_s": dict.fromkeys(CONFIG.slot_buckets, Curve(((0.0, 0.0), (9.0, 0.0))))},
        {"prefill_s": dict.fromkeys(CONFIG.token_buckets, Curve(((-1.0, 2.0),)))},
    ],
)
def test_a_file_of_impossible_times_is_refused(tmp_path, changes):
    """Seconds and positions are finite and not negative, and an iteration takes some time."""
    path = tmp_path / "times.json"
    replace(made_up(), **changes).save(path)
    with pytest.raises(InvalidProfileError, match="measure again"):
        StepTimes.load(path)


def test_a_file_of_deeply_nested_values_is_refused(tmp_path):
    """Its reader goes no deeper than Python's stack."""
    path = tmp_path / "times.json"
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidProfileError, match="does not hold step times"):
        StepTimes.load(path)


def test_tables_merge_entry_by_entry():
    """Each entry is the median over the tables that have it."""
    slow = replace(made_up(), edit_s=9.0, loop_s={w: 0.0 for w in CONFIG.slot_buckets})
    fast = replace(made_up(), edit_s=0.0, loop_s={w: 0.0 for w in CONFIG.slot_buckets})
    merged = StepTimes.median([slow, made_up(), fast])
    assert merged == replace(made_up(), loop_s={w: 0.0 for w in CONFIG.slot_buckets})
