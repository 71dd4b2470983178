"""Verdicts on the figures of a gpu-check."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scripts.gpu_bars import bars, print_table


def _shape(name: str, rows: int, queries: int, context: int, **figures: Any) -> dict[str, Any]:
    return {
        "shape": name,
        "rows": rows,
        "longest_query": queries,
        "shortest_context": context,
        "seconds": 1e-3,
        "of_copy": 0.8,
        "flops_per_s": 410e12,
        "error": 3e-3,
        **figures,
    }


def _kernels(*shapes: dict[str, Any], name: str = "kernels") -> dict[str, Any]:
    return {name: {"status": "done", "result": {"shapes": list(shapes), "failed": {}}}}


def _found(parts: dict[str, Any], what: str) -> tuple[str, str]:
    """Return verdict and finding of the line that begins with this text."""
    (line,) = [line for line in bars(parts) if line["what"].startswith(what)]
    return line["verdict"], line["found"]


DECODE = _shape("decode_32x4096", 32, 1, 4096)
PREFILL = _shape("prefill_4096", 1, 4096, 4096)


def test_without_figures_nothing_is_met():
    """Every line with a bar is not measured, with the reason if it is known."""
    parts = {"mosaic_tests": {"status": "skipped", "reason": "the 570 s were over"}}
    lines = bars(parts)
    assert {line["verdict"] for line in lines} == {"not measured"}
    assert _found(parts, "Mosaic's kernels against")[1] == "the 570 s were over"
    print_table(lines)


def test_the_worst_shape_decides():
    """Decoding counts from 32 rows and 4096 tokens on; smaller batches and contexts do not."""
    small = _shape("decode_8x4096", 8, 1, 4096, of_copy=0.1)
    short = _shape("decode_32x1024", 32, 1, 1024, of_copy=0.2)
    what = "decode, batch >= 32"
    assert _found(_kernels(DECODE, small, short), what)[0] == "met"
    slow = _shape("decode_64x8192", 64, 1, 8192, of_copy=0.74)
    assert _found(_kernels(DECODE, slow), what) == ("not met", "74% at worst, decode_64x8192")
    both = {**_kernels(DECODE), **_kernels(slow, name="kernels_rest")}
    assert _found(both, what)[0] == "not met"


def test_prefill_has_a_bar_a_kernel():
    """Triton's bar is 400 TFLOP/s, Mosaic's 550; a turn of few queries is not a prompt."""
    turn = _shape("turn", 1, 20, 32768, flops_per_s=1e12)
    parts = {**_kernels(PREFILL, turn), **_kernels(PREFILL, name="mosaic")}
    assert _found(parts, "prefill, 4096 and more, Triton")[0] == "met"
    assert _found(parts, "prefill, 4096 and more, Mosaic")[0] == "not met"


@pytest.mark.parametrize("share, verdict", [(0.91, "met"), (0.89, "not met")])
def test_mixed_batches_are_held_to_their_parts(share, verdict):
    """The bar is 90 % of the sum of the rooflines of decoding rows and of other rows."""
    mixed = _shape("mixed", 9, 512, 4096, of_parts_bound=share)
    assert _found(_kernels(mixed), "mixed, Triton")[0] == verdict


def test_an_error_that_is_no_number_is_not_met():
    """A single NaN among many shapes is enough."""
    what = "attention, relative error"
    assert _found(_kernels(DECODE, PREFILL), what)[0] == "met"
    assert _found(_kernels({**DECODE, "error": math.nan}, PREFILL), what)[0] == "not met"
    assert _found(_kernels(DECODE, {**PREFILL, "error": 0.02}), what)[0] == "not met"


def test_products_in_few_bits_are_held_to_the_roofline():
    """Prefill counts for the error only; steps of few tokens also against dense products."""
    few = {"shape": "few", "tokens": 16, "error": 1e-3, "of_bound": 0.75}
    few |= {"seconds": 1e-5, "dense_s": 2e-5}
    many = {**few, "shape": "many", "tokens": 4096, "of_bound": 0.3, "dense_s": 0.5e-5}
    parts = {"products": {"status": "done", "result": {"products": [few, many]}}}
    assert _found(parts, "products in few bits, relative error")[0] == "met"
    assert _found(parts, "products in few bits, up to 64") == ("met", "75% at worst, few")
    assert _found(parts, "products in few bits: speed")[1] == "2.00 times at worst, few"


def test_products_of_groups_are_held_to_xla_and_a_loop():
    """At the worst shape, too, they are not slower."""
    row = {"shape": "a", "error": 1e-3, "seconds": 1e-4, "xla_s": 2e-3, "loop_s": 3e-4}
    slow = row | {"shape": "b", "loop_s": 0.9e-4}
    parts = {"groups": {"status": "done", "result": {"groups": [row, slow]}}}
    assert _found(parts, "products of groups, relative error")[0] == "met"
    assert _found(parts, "products of groups: speed over XLA") == ("met", "20.00 times at worst, a")
    assert _found(parts, "products of groups: speed over a loop")[0] == "not met"


def test_peers_are_compared_where_both_have_a_time():
    """A peer that could not run is not measured, and its reason is shown."""
    own = {**DECODE, "peers": {"cudnn_dense": {"seconds": 2e-3}, "jax_paged": {"reason": "no"}}}
    theirs = {
        "kernel_peers": {
            "status": "done",
            "result": {
                "shapes": [
                    {"shape": "decode_32x4096", "peers": {"flashinfer": {"seconds": 0.5e-3}}},
                    {"shape": "prefill_4096", "peers": {"flashinfer": {"seconds": 4e-3}}},
                    {"shape": "never_ours", "peers": {"flashinfer": {"seconds": 1e-9}}},
                ]
            },
        }
    }
    parts = {**_kernels(own, PREFILL), **theirs}
    assert _found(parts, "faster than cudnn_dense")[0] == "met"
    assert _found(parts, "faster than jax_paged") == ("not measured", "no")
    verdict, found = _found(parts, "faster than flashinfer")
    assert verdict == "not met"
    assert found == "1 of 2 shapes; 0.50 times at worst, decode_32x4096"


def _model(of_bound: float = 0.85, gap: float = 0.01, ours: float = 900.0) -> dict[str, Any]:
    row = {"of_bound": of_bound, "host_gap_share": gap, "output_tokens_per_s": ours}
    batches = [{"batch_size": 32, **row}, {"batch_size": 1, **row}]
    batches.append({"batch_size": 256, "does_not_fit": "100 GB"})
    theirs = [{"batch_size": 32, "output_tokens_per_s": 600.0}]
    return {
        "decode_llama_3_8b": {"status": "done", "result": {"batches": batches, "prefill": []}},
        "hf_llama_3_8b": {"status": "done", "result": {"batches": theirs}},
    }


def test_models_are_held_to_their_roofline_and_their_peer():
    """Batches that do not fit are named; the peer counts if it has the same batch."""
    what = "Llama 3 8B, decode"
    assert _found(_model(), what) == ("met", "1: 85%, 32: 85%; no memory for 256")
    assert _found(_model(of_bound=0.5), what)[0] == "not met"
    assert _found(_model(), "Llama 3 8B: device idle")[0] == "met"
    assert _found(_model(gap=0.03), "Llama 3 8B: device idle")[0] == "not met"
    peer = "Llama 3 8B: tokens/s over transformers"
    assert _found(_model(), peer) == ("met", "32: 1.50 times")
    assert _found(_model(ours=500.0), peer)[0] == "not met"
    assert _found(_model(), "Llama 2 13B, decode") == ("not measured", "not run")


def test_a_trace_says_more_of_idleness_than_the_host():
    """Gaps between steps count; the share of all gaps is shown beside them."""
    parts = _model(gap=0.5)
    trace = {"batch_size": 32, "idle_share": 0.3, "long_gap_share": 0.001}
    parts["decode_llama_3_8b"]["result"]["traces"] = [trace]
    verdict, found = _found(parts, "Llama 3 8B: device idle")
    assert (verdict, found) == ("met", "30.0%, 0.1% in gaps of 20 us and more")


def test_tests_that_were_cut_off_are_not_called_passed():
    """A failure counts at once; passing counts when all tests have run."""
    whole = {"passed": 5, "failed": [], "skipped": 0}
    for status, counted, verdict in (
        ("done", whole, "met"),
        ("cut off", whole, "not measured"),
        ("cut off", {**whole, "failed": ["x"]}, "not met"),
        ("failed", {**whole, "failed": ["x"]}, "not met"),
        ("done", {"passed": 0, "failed": [], "skipped": 5}, "not measured"),
    ):
        parts = {"tests": {"status": status, "result": counted}}
        assert _found(parts, "kernels against XLA")[0] == verdict, (status, counted)


@pytest.mark.parametrize(
    ("launches", "peak", "verdicts"),
    [
        (248, 70e9, ("as predicted", "as predicted")),
        (700, 79e9, ("worse than predicted", "worse than predicted")),
        (200, 60e9, ("better than predicted", "better than predicted")),
        (None, None, ()),
    ],
)
def test_each_prediction_has_a_verdict_in_words(launches, peak, verdicts):
    """Within a tenth a figure is as predicted: launches of an iteration, and memory."""
    trace = {"batch_size": 32, "idle_share": 0.0, "long_gap_share": 0.0}
    result: dict[str, Any] = {
        "traces": [trace | {"launches_an_iteration": launches}],
        "batches": [],
    }
    if peak is not None:
        result["memory"] = {"peak_bytes": peak, "planned_bytes": 70e9}
    parts = {"decode_llama_3_8b": {"status": "done", "result": result}}
    if verdicts:
        assert _found(parts, "Llama 3 8B, launches")[0] == verdicts[0]
        assert _found(parts, "Llama 3 8B, GB")[0] == verdicts[1]
    else:
        assert not [line for line in bars(parts) if "launches" in line["what"]]
        assert _found(parts, "Llama 3 8B, GB")[0] == "not measured"


@pytest.mark.parametrize(("compiled", "verdict"), [(0, "met"), (3, "not met")])
def test_a_second_start_compiles_nothing(compiled, verdict):
    start = {"first_token_s": 9.04, "num_compiled": compiled, "num_loaded": 6}
    parts = {"start": {"status": "done", "result": {"warm": start}}}
    line = f"{compiled}, 6 loaded; s to a token: warm 9.0"
    assert _found(parts, "Llama 3 8B, executables") == (verdict, line)


def test_choices_stand_side_by_side():
    """Each batch has a line with every layout and every flag."""
    row = {"batch_size": 1, "layout": "scanned", "decode_step_s": 0.002}
    parts = {
        "choices": {"result": {"choices": [row]}},
        "choices_host": {"result": {"choices": [{**row, "decode_step_s": 0.001}]}},
    }
    found = "scanned default 2.00, scanned host 1.00"
    assert _found(parts, "ms a step, batch 1") == ("no bar", found)


def test_pages_that_come_back_are_shown_without_a_bar():
    """Each situation and length has a line with every way; without figures it has the reason."""
    point = {"situation": "at_once", "length": 1024, "first_token_s": 0.05, "others_lost_s": 0.03}
    points = [
        {**point, "way": "on_device"},
        {**point, "way": "per_layer", "first_token_s": 0.06},
        {**point, "way": "both", "situation": "waits"},
    ]
    what = "ms to the first token (others lose), 1024 from the host"
    parts = {"restore": {"status": "cut off", "result": {"points": points}}}
    assert _found(parts, f"{what}, at once") == ("no bar", "on_device 50 (30), per_layer 60 (30)")
    assert _found(parts, f"{what}, waits") == ("no bar", "both 50 (30)")
    skipped = {"restore": {"status": "skipped", "reason": "the 570 s were over"}}
    line = "pages that come back from the host"
    assert _found(skipped, line) == ("not measured", "the 570 s were over")
