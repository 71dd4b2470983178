"""KV bytes of a sequence beside what its layers need: `python -m benchmarks.memory`.

No device is used: the scheduler and its KV manager serve one request on the simulated executor, and
the pages that the sequence holds are counted after each step of the last tokens of its answer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any, final

from benchmarks.common.harness import Benchmark, option
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import PRESETS

# Tokens of an answer over which the mean is taken: several pages and windows of pages pass.
_NUM_MEASURED = 256


@final
@dataclass(frozen=True)
class Shape:
    """The layers of a model with keys and values: the window of each, and their heads."""

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    value_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Keys and values of one position in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.value_bytes

    def needed_bytes(self, context: int) -> int:
        return self.token_bytes * sum(min(context, each or context) for each in self.windows)


def _every(number: int, num_layers: int, window: int) -> tuple[int | None, ...]:
    """Return the windows of layers of which each `number`-th sees the whole context."""
    return tuple(window if (i + 1) % number else None for i in range(num_layers))


SHAPES = {
    "gemma-3-1b": Shape(_every(6, 26, 512), 1, 256),
    "gemma-3-4b": Shape(_every(6, 34, 1024), 4, 256),
    "gemma-3-27b": Shape(_every(6, 62, 1024), 16, 128),
    "gemma-2-9b": Shape(_every(2, 42, 4096), 8, 256),
    "gpt-oss-20b": Shape(_every(2, 24, 128), 8, 64),
    "olmo-3-7b": Shape(_every(4, 32, 4096), 32, 128),
    "llama-3-8b": Shape((None,) * 32, 8, 128),
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "rows": [
            {"shape": name, "context": context, **held_and_needed(SHAPES[name], context)}
            for name in options.shapes
            for context in options.contexts
        ]
    }


def held_and_needed(shape: Shape, context: int) -> dict[str, float]:
    """Return bytes at a context, and how many times what the layers need they are."""
    needed = statistics.fmean(
        shape.needed_bytes(num) for num in range(context - _NUM_MEASURED, context)
    )
    grouped, reserved = _held_bytes(shape, context, shape.windows)
    one_group, _ = _held_bytes(shape, context, ())
    return {
        "needed_bytes": needed,
        "held_bytes": grouped,
        "held": grouped / needed,
        "reserved": reserved / needed,
        "held_in_one_group": one_group / needed,
    }


def _held_bytes(
    shape: Shape, context: int, layer_windows: tuple[int | None, ...]
) -> tuple[float, float]:
    """Return the mean bytes that a sequence holds, and has reserved, before it has `context`."""
    config = EngineConfig(
        num_pages=2,
        max_slots=1,
        max_context=context,
        max_step_tokens=2048,
        max_decode_iterations=16,
        layer_windows=layer_windows,
    )
    layout = config.page_layout
    num_layers = layout.num_buffers if layout.is_grouped else len(shape.windows)
    page_bytes = num_layers * config.page_size * shape.token_bytes
    config = replace(config, num_pages=1 + config.max_pages_per_sequence)
    clock = VirtualClock()
    executor = SimulatedExecutor(config, clock, reads_context=False)
    engine = Engine(executor, PRESETS["vllm_like"], clock)
    params = SamplingParams(max_tokens=_NUM_MEASURED, ignore_eos=True)
    prompt = (1,) * (context - _NUM_MEASURED)
    (sequence,) = engine.add(Request(id="0", prompt=prompt, params=params, arrival_s=0.0))
    held, reserved = [], []
    while engine.has_work:
        engine.step()
        if sequence.num_planned_outputs > 1 and sequence.slot is not None:
            held.append(sequence.kv.table.num_pages)
            reserved.append(sequence.kv.table.reservation)
    return statistics.fmean(held) * page_bytes, statistics.fmean(reserved) * page_bytes


CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
OPTIONS = (
    option("--shapes", list(SHAPES), "shapes of layers", str, nargs="+", choices=list(SHAPES)),
    option("--contexts", list(CONTEXTS), "tokens of a sequence", int, nargs="+"),
)
main = Benchmark(__doc__, run, OPTIONS, "memory")


if __name__ == "__main__":
    sys.exit(main())
