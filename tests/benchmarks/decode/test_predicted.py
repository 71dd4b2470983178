"""The predicted decode step is the sum of its kernels, as worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.decode.predicted import BATCHES, main, run
from benchmarks.decode.step_time import Device, Launches, counted, fits, predict
from benchmarks.figures.render import drawn
from benchmarks.figures.results import Place
from benchmarks.figures.tables import PREDICTED_DECODE

pytestmark = pytest.mark.release

ROUND = Device(bytes_per_s=1e12, flops_per_s=1e15, launch_s=1e-6, host_s=1e-5, memory_bytes=20e9)
ROOT = Path(__file__).parents[3]


def test_a_step_by_hand():
    """Llama 3 8B, 32 sequences of 1,000 tokens, on a device with round rates."""
    own = predict(
        "llama-3-8b",
        ROUND,
        Launches(a_layer=7, beside=10, host_decisions=1),
        batch=32,
        context=1000,
    )
    # 4096 x 6144 + 4096 x 4096 + 4096 x 28672 + 14336 x 4096 = 218,103,808 weights a layer.
    assert own.products_s == pytest.approx(32 * 218_103_808 * 2 / 1e12)
    # Keys and values of a token: 2 x 8 x 128 numbers in each of 32 layers, 131,072 bytes.
    assert own.keys_and_values_s == pytest.approx(32 * 1000 * 131_072 / 1e12)
    # 4096 x 128256 weights, and logits of four bytes that are written and read.
    assert own.head_s == pytest.approx((525_336_576 * 2 + 2 * 32 * 128_256 * 4) / 1e12)
    assert own.launches_s == pytest.approx((32 * 7 + 10) * 1e-6)
    assert own.host_s == pytest.approx(1e-5)
    assert own.total_s == pytest.approx(
        13.958644e-3 + 4.194304e-3 + 1.083507e-3 + 0.234e-3 + 0.01e-3, rel=1e-5
    )
    # 16.06 GB of weights and 131,072 bytes a token.
    assert fits("llama-3-8b", ROUND, batch=30, context=1000)
    assert not fits("llama-3-8b", ROUND, batch=31, context=1000)


def test_many_tokens_are_bound_by_arithmetic_and_small_pages_by_half_the_bytes():
    """A product takes the longer of both; a float8 page has a byte and a share of a scale."""
    launches = Launches(a_layer=0, beside=0)
    many = predict("llama-3-8b", ROUND, launches, batch=4000, context=1)
    assert many.products_s == pytest.approx(32 * 2 * 4000 * 218_103_808 / 1e15)
    eight = predict("llama-3-8b", ROUND, launches, batch=1, context=1000, kv_dtype="float8_e4m3fn")
    assert eight.keys_and_values_s == pytest.approx(32 * 1000 * 2 * 8 * (128 + 4) / 1e12)


def test_launches_are_those_that_the_gate_counted():
    """Every batch of the table has a compiled loop, which the host does not decide."""
    for batch in BATCHES:
        assert 0 < counted(batch).a_layer < 14
        assert counted(batch).host_decisions == 0


def test_the_page_has_the_tables_of_the_command():
    """docs/performance_model.md shows what the command prints."""
    page = (ROOT / "docs/performance_model.md").read_text(encoding="utf-8")
    for arguments in ([], ["--kv-dtype", "float8_e4m3fn", "--batches", "32,64"]):
        result = run(main.parser().parse_args(arguments))
        assert drawn(PREDICTED_DECODE, "rows.*", Place(ROOT, result, "")) in page
