"""Metrics that are read from the engine's counters."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from jaxserve import SamplingParams
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.planning.schedules.schedule import LatencyBounds
from jaxserve.runtime import RuntimeStats
from jaxserve.server.metrics import Metrics


def _exposed(**changed: Any) -> set[str]:
    """Return the lines of an engine whose counters are all 3, except for those given."""
    counters: dict[str, Any] = {field.name: 3 for field in fields(RuntimeStats)}
    counters |= {"plan": None, "adapters": None, "num_accepted_by_place": (2, 1)}
    counters |= {"num_iterations_by_tokens": (1, 2) + (0,) * 10 + (4, 5)}
    stats = RuntimeStats(**{**counters, **changed})
    text = Metrics("tiny", "jaxserve", lambda: stats).exposition().decode()
    return {line.replace('engine="0",model_name="tiny"', "..") for line in text.splitlines()}


def test_times_of_forced_answers():
    """A grammar that forces the whole answer, or its beginning, leaves no time to the prompt."""
    for admitted_s, waited_s in ((None, 0.5), (2.0, 1.0)):
        metrics = Metrics("tiny", "jaxserve", lambda: None)
        sample = Sample(text="abc", token_ids=(1, 2, 3), finish_reason="stop")
        timing = Timing(arrival_s=1.0, admitted_s=admitted_s, first_token_s=1.5, finished_s=4.0)
        completion = Completion(
            request_id="r", prompt_token_ids=(1,), samples=(sample,), timing=timing
        )
        metrics.ended(completion, SamplingParams())
        lines = metrics.exposition().decode().splitlines()
        found = {line.split("{")[0]: line.split()[-1] for line in lines if line[0] != "#"}
        assert found["jaxserve:time_to_first_token_seconds_sum"] == "0.5"
        assert found["jaxserve:request_queue_time_seconds_sum"] == str(waited_s)
        assert found["jaxserve:request_prefill_time_seconds_sum"] == "0.0"
        assert found["jaxserve:e2e_request_latency_seconds_count"] == "1.0"


def test_speculation_has_the_names_of_vllm():
    found = _exposed()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f"jaxserve:spec_decode_num_{name}_total{{..}} 3.0" in found
    name = "jaxserve:spec_decode_num_accepted_tokens_per_pos_total"
    assert {f'{name}{{..,position="0"}} 2.0', f'{name}{{..,position="1"}} 1.0'} <= found


def test_pages_by_tier():
    """Pages of the device are owned, reserved, cached or free, of the host used or free."""
    found = _exposed(num_pages_usable=20, num_pages_owned=4, num_host_pages=7, num_disk_pages=5)
    for tier, state, count in (
        ("device", "owned", 4),
        ("device", "reserved", 3),
        ("device", "cached", 3),
        ("device", "free", 10),
        ("host", "used", 3),
        ("host", "free", 4),
        ("disk", "used", 5),
    ):
        assert f'jaxserve:kv_pages{{..,state="{state}",tier="{tier}"}} {count}.0' in found


def test_tokens_of_iterations():
    """A histogram with the name and bounds of vLLM's; its sum is that of the tokens computed."""
    found = _exposed(num_tokens=90)
    name = "jaxserve:iteration_tokens_total"
    counts = {"1.0": 1, "8.0": 3, "16.0": 3, "8192.0": 3, "16384.0": 7, "+Inf": 12}
    for bound, count in counts.items():
        line = f'{name}_bucket{{engine="0",le="{bound}",model_name="tiny"}} {count}.0'
        assert line in found
    assert {f"{name}_sum{{..}} 90.0", f"{name}_count{{..}} 12.0"} <= found


def test_moved_bytes_by_direction():
    """Copies between device and host, and files of the disk, in bytes of pages."""
    found = _exposed(
        pool_bytes=300,
        num_pages=3,
        num_pages_out=1,
        num_pages_in=2,
        num_pages_to_disk=4,
        num_pages_from_disk=5,
    )
    name = "jaxserve:kv_moved_bytes_total"
    for direction, count in (("to_host", 1), ("to_device", 2), ("to_disk", 4), ("from_disk", 5)):
        assert f'{name}{{direction="{direction}",..}} {100.0 * count}' in found


def test_the_schedule_in_force_and_its_bounds():
    """Of the bounds those that are given; without a schedule there is none of these metrics."""
    plan = SimpleNamespace(
        name="RRA encode 2, decode 9",
        bounds=LatencyBounds(latency_s=2.0),
        latency_s=1.5,
        first_token_s=0.5,
        token_s=0.25,
    )
    found = _exposed(plan=plan)
    assert {line for line in found if line.startswith("jaxserve:schedule")} == {
        'jaxserve:schedule_info{..,schedule="RRA encode 2, decode 9"} 1.0',
        'jaxserve:schedule_bound_seconds{..,of="latency"} 2.0',
        'jaxserve:schedule_expected_seconds{..,of="latency"} 1.5',
        'jaxserve:schedule_expected_seconds{..,of="first_token"} 0.5',
        'jaxserve:schedule_expected_seconds{..,of="token"} 0.25',
    }
    assert not any("schedule" in line for line in _exposed())
