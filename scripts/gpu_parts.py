"""The parts of `make gpu-check`, the most important first, and their time limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

# Shapes that the bars need; the other shapes of the curves come last.
_FIRST = ",".join(
    (
        *("llama3_8b_decode_32x4096", "llama3_8b_decode_128x4096", "llama3_8b_decode_32x16384"),
        *("llama3_8b_prefill_4096", "llama3_8b_prefill_16384", "mixed"),
        *("llama3_8b_decode_256x4096", "llama2_13b_decode_32x4096", "llama3_8b_decode_ragged"),
        "llama3_8b_decode_1x16384",
    )
)
# Fraction of the memory that JAX allocates at its start; JAX's default is 0.75.
_MOST_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
_PYTEST = ("pytest", "-v", "--tb=line", "-W", "default", "-p", "no:cacheprovider")
_TESTS = (*_PYTEST, "tests/pallas_kernels/test_on_gpu.py", "-k")
# Triton is passed by name, so that a shape that it refuses fails instead of being timed with XLA.
_TRITON = ("benchmarks.kernels", "--attention", "triton")
_EIGHT_BITS = (
    *(*_TRITON, "--shapes", "llama3_8b_decode_32x4096,llama3_8b_decode_128x4096"),
    "--kv-dtype",
)
# By default tests compile with little optimisation.
_AS_SERVED = {"XLA_FLAGS": ""}
_COMMAND_BUFFER = "--xla_gpu_enable_command_buffer="


@final
@dataclass(frozen=True)
class Part:
    """A process of gpu-check.

    Attributes:
      command: a Python module and its arguments.
      limit_s: seconds after which the process is ended; its result up to then counts.
      environment: environment variables to set.
      writes: whether it takes `--budget` and `--output`, as benchmarks do; otherwise it is pytest.
    """

    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    writes: bool = True


def _decode(model: str, *arguments: str) -> tuple[str, ...]:
    return ("benchmarks.decode", "--model", model, *arguments)


_CHOICES = ("benchmarks.decode.choices",)

PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "kernels": Part((*_TRITON, "--peers", "--shapes", _FIRST), 110),
        "kernel_peers": Part(("benchmarks.kernels.peers", "--shapes", _FIRST), 90),
        "decode_llama_3_8b": Part(
            _decode(
                "llama-3-8b",
                "--batches",
                "32,1,128,256,8",
                "--prefill",
                "8x4096,32x512",
                "--trace",
                "32",
            ),
            130,
            _MOST_MEMORY,
        ),
        "hf_llama_3_8b": Part(("benchmarks.decode.peer", "--batches", "32,1,128,8,256"), 70),
        # Kernels that have not run on a GPU yet may hang there, so they are a separate part.
        "mosaic": Part(
            (
                *("benchmarks.kernels", "--attention", "mosaic", "--shapes"),
                "llama3_8b_prefill_4096,llama3_8b_prefill_16384,mixed,llama3_8b_decode_32x4096,"
                "llama3_8b_decode_128x4096,llama3_8b_decode_32x16384",
            ),
            60,
        ),
        "kernels_rest": Part(
            (
                *(*_TRITON, "--peers", "--shapes", "decode,prefill,write,copy,cell"),
                *("--leave-out", _FIRST),
            ),
            100,
        ),
        "products": Part(("benchmarks.kernels", "--shapes", "fused,product"), 100),
        "choices": Part(_CHOICES, 45),
        "choices_host": Part(_CHOICES, 45, {"XLA_FLAGS": f"{_COMMAND_BUFFER}-WHILE"}),
        "choices_none": Part(_CHOICES, 45, {"XLA_FLAGS": _COMMAND_BUFFER}),
        "decode_llama_2_13b": Part(
            _decode("llama-2-13b", "--batches", "32,1,8,128,256", "--prefill", "4x4096"),
            90,
            _MOST_MEMORY,
        ),
        "hf_llama_2_13b": Part(
            ("benchmarks.decode.peer", "--model", "llama-2-13b", "--batches", "32,1,8,128,256"), 60
        ),
        "tests": Part((*_TESTS, "not mosaic and not invariant"), 150, _AS_SERVED, writes=False),
        # A request has the same bits in any batch: of each kernel, and of a whole runtime.
        "invariant_tests": Part(
            (*_PYTEST, "tests/runtime/test_row_kernels.py", *_TESTS[len(_PYTEST) :], "invariant"),
            120,
            _AS_SERVED,
            writes=False,
        ),
        "mosaic_tests": Part((*_TESTS, "mosaic"), 60, _AS_SERVED, writes=False),
        "kernel_peers_rest": Part(
            ("benchmarks.kernels.peers", "--shapes", "decode,prefill", "--leave-out", _FIRST), 150
        ),
        "restore": Part(
            (
                *(
                    "benchmarks.conversations.restore",
                    "--model",
                    "llama-3-8b",
                    "--lengths",
                    "4096,1024",
                ),
                # Loops have 16 iterations, and pages are copied back during several loops.
                *("--others", "7", "--wait-tokens", "256", "--kv-memory", "8GiB"),
            ),
            150,
        ),
        **{f"kernels_{kind}": Part((*_EIGHT_BITS, kind), 60) for kind in ("int8", "float8_e4m3fn")},
        **{
            f"decode_llama_3_8b_{kind}": Part(
                _decode("llama-3-8b", "--batches", "32,256", "--kv-dtype", kind), 90, _MOST_MEMORY
            )
            for kind in ("int8", "float8_e4m3fn")
        },
    }
)
