"""The FFI targets of all C++ kernels, which executables from an earlier process call by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pallas_kernels import build

_HERE = Path(__file__).parent
# (source, symbol) of the handlers, those first that take the longest to compile.
_HANDLERS = (
    (_HERE / "paged_attention" / "cpu.cc", "PagedAttention"),
    (_HERE / "matmul" / "cpu.cc", "Matmul"),
    (_HERE / "matmul" / "cpu.cc", "GroupedMatmul"),
    (_HERE / "quantised_matmul" / "cpu.cc", "QuantisedMatmul"),
    (_HERE / "matmul" / "panels.cc", "PanelMatmul"),
    (_HERE / "low_rank" / "cpu.cc", "AddLowRank"),
    (_HERE / "kv_write" / "cpu.cc", "RotateAndWrite"),
    (_HERE / "pointwise" / "cpu.cc", "RmsNorm"),
    (_HERE / "pointwise" / "cpu.cc", "GatedSilu"),
    (_HERE / "pointwise" / "cpu.cc", "LayerNorm"),
    (_HERE / "pointwise" / "cpu.cc", "LogSumExp"),
    (_HERE / "zeros.cc", "Zeros"),
)
_FLOAT8_HANDLERS = ((_HERE / "put_rows.cc", "PutRows"),)


def cpu_targets(*, has_float8: bool = False) -> tuple[str, ...]:
    """Register the C++ kernels, and return their targets or why there is none, in a fixed order.

    Libraries that the cache folder does not have are compiled at the same time.

    Args:
      has_float8: whether pages may be in float8, for which there is a kernel more.
    """
    handlers = (*_HANDLERS, *(_FLOAT8_HANDLERS if has_float8 else ()))
    with ThreadPoolExecutor(len(handlers), thread_name_prefix="jaxserve-kernels") as threads:
        return tuple(threads.map(_target, handlers))


def _target(handler: tuple[Path, str]) -> str:
    try:
        return build.cpu_target(*handler)
    except NotImplementedError as error:
        return f"none: {error}"
