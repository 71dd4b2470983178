"""The FFI targets of all C++ kernels, which executables from an earlier process call by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxserve.kernels import build
from jaxserve.kernels.matmul.panels import STORED

Handler = tuple[Path, str, tuple[str, ...]]
_HERE = Path(__file__).parent
_PAGES = _HERE / "paged_attention" / "cpu.cc"
# The flags of attention over pages of each dtype.
PAGES: Mapping[str, tuple[str, ...]] = {
    "float32": ("-DPAGES=float",),
    "bfloat16": ("-DPAGES=Bfloat16",),
    "int8": ("-DPAGES=int8_t",),
    "float8_e4m3fn": ("-DPAGES=Float8",),
}
_PANELS = _HERE / "matmul" / "panels.cc"
ZEROS: Handler = (_HERE / "zeros.cc", "Zeros", ())
# Handlers that nearly every model calls, those that take the longest to compile first.
_USUAL: tuple[Handler, ...] = (
    (_HERE / "matmul" / "cpu.cc", "Matmul", ()),
    (_HERE / "pointwise" / "cpu.cc", "RmsNorm", ()),
    (_HERE / "matmul" / "columns.cc", "PanelColumns", ()),
    (_HERE / "kv_write" / "cpu.cc", "RotateAndWrite", ()),
    ZEROS,
)
_QUANTISED: Handler = (_HERE / "quantised_matmul" / "cpu.cc", "QuantisedMatmul", ())
_LOW_RANK: Handler = (_HERE / "low_rank" / "cpu.cc", "AddLowRank", ())
_OTHERS: tuple[Handler, ...] = (
    *(_QUANTISED, _LOW_RANK),
    (_HERE / "matmul" / "cpu.cc", "GroupedMatmul", ()),
    (_HERE / "pointwise" / "cpu.cc", "GatedSilu", ()),
    (_HERE / "pointwise" / "cpu.cc", "LayerNorm", ()),
    (_HERE / "pointwise" / "cpu.cc", "LogSumExp", ()),
    (_HERE / "put_rows.cc", "PutRows", ()),
)


HANDLERS: tuple[Handler, ...] = (
    *((_PAGES, "PagedAttention", flags) for flags in PAGES.values()),
    *((_PANELS, "PanelMatmul", flags) for flags in STORED.values()),
    *_USUAL,
    *_OTHERS,
)


def target_names(handlers: Sequence[Handler] = HANDLERS) -> tuple[str, ...]:
    """Return the target of each C++ kernel, or why there is none, in a fixed order.

    Nothing is compiled: a kernel that was never compiled counts as available.
    """
    return tuple(_name(handler) for handler in handlers)


def compile_together(
    pages_dtype: str,
    panels_dtype: str = "float32",
    *,
    is_quantised: bool = False,
    has_adapters: bool = False,
) -> None:
    """Compile the kernels that a model will need, in parallel; others when they are called.

    Args:
      pages_dtype, panels_dtype: dtypes of keys and values, and of weights in panels.
      is_quantised: whether weights have eight or four bits.
    """
    pages = [(_PAGES, "PagedAttention", PAGES[pages_dtype])] if pages_dtype in PAGES else []
    more = [*[_QUANTISED] * is_quantised, *[_LOW_RANK] * has_adapters]
    usual = [*_USUAL, (_PANELS, "PanelMatmul", STORED[panels_dtype])]
    _register([*pages, *more, *usual])


def register_called(executable: bytes, handlers: Sequence[Handler] = HANDLERS) -> None:
    """Register the kernels whose targets are named in a serialised executable, so that it loads.

    Raise `NotImplementedError` if it names a kernel that is missing or has another version.
    """
    called = set(re.findall(rb"pallas_kernels\.\w+\.[0-9a-f]{16}", executable))
    known = {_name(handler).encode(): handler for handler in handlers} if called else {}
    if unknown := sorted(called - known.keys()):
        raise NotImplementedError(f"it calls {unknown[0].decode()}, which is not there")
    if missing := [error for error in _register([known[name] for name in called]) if error]:
        raise NotImplementedError(missing[0])


def _register(handlers: Sequence[Handler]) -> list[str]:
    """Register handlers, and return why each one is missing; "" for one that is registered."""
    if not handlers:
        return []
    with ThreadPoolExecutor(len(handlers), thread_name_prefix="jaxserve-kernels") as threads:
        return list(threads.map(_why_not, handlers))


def _why_not(handler: Handler) -> str:
    try:
        build.cpu_target(*handler)
    except NotImplementedError as error:
        return str(error)
    return ""


def _name(handler: Handler) -> str:
    try:
        return build.target_name(*handler)
    except NotImplementedError as error:
        return f"none: {error}"
