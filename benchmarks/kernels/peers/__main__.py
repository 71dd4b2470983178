"""PyTorch's attention kernels at the same shapes: `python -m benchmarks.kernels.peers --help`.

A peer that is missing or fails is recorded with the reason. One JSON object on stdout, a table on
stderr; docs/benchmarks/gpu.md says what each figure means.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import platform
import sys
from typing import Any, Protocol

import torch
from rich.table import Table
from tqdm import tqdm

from benchmarks.common import environment
from benchmarks.common.output import command, record_parser, show
from benchmarks.common.record import Record, reason
from benchmarks.kernels.peers.case import Case
from benchmarks.kernels.peers.dense import Dense
from benchmarks.kernels.peers.flash import FlashAttention2, FlashAttention3
from benchmarks.kernels.peers.flex import PagedFlex
from benchmarks.kernels.peers.infer import FlashInfer
from benchmarks.kernels.peers.timing import Attend, measure
from benchmarks.kernels.shapes import chosen
from benchmarks.kernels.timing import num_layers
from jaxserve.core.errors import InvalidConfigError
from pallas_kernels.paged_attention.shapes import AttentionShape

PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-3")


class Peer(Protocol):
    """An implementation of attention.

    Attributes:
      page_size: tokens of its pages.
      package: the Python package that it needs.
    """

    page_size: int
    package: str

    def prepare(self, case: Case) -> Attend:
        """Return the call to time. Raises NotImplementedError for a shape that it cannot serve."""
        ...


# The quickest to compile first.
PEERS: dict[str, Peer] = {
    "torch_flash_dense": Dense("flash"),
    "torch_cudnn_dense": Dense("cudnn"),
    "flash_attention_3": FlashAttention3(),
    "flash_attention_2": FlashAttention2(),
    "flashinfer": FlashInfer(),
    "torch_flex_paged": PagedFlex(),
}


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every shape."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shapes, _ = chosen(options.shapes, options.leave_out)
    names = options.peers.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        raise InvalidConfigError(f"unknown peers {unknown}; give some of {tuple(PEERS)}")
    record = Record(
        options.output,
        options.budget,
        benchmark="kernel_peers",
        dtype=options.dtype,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        versions={"python": platform.python_version(), **environment.versions(*PACKAGES)},
        commit=environment.commit(),
    )
    dtype = getattr(torch, options.dtype)
    for shape in tqdm(shapes, desc="timing peers", delay=2, leave=False):
        found: dict[str, Any] = {"shape": shape.name, "peers": {}}
        record.result.setdefault("shapes", []).append(found)
        for name in names:
            if record.is_spent:
                record.skip(f"{shape.name}, {name}")
                continue
            found["peers"][name] = figures(PEERS[name], shape, device, dtype)
            record.save()
    return record.result


def figures(
    peer: Peer, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return `seconds` of a call and its `error`, or the `reason` why there are none."""
    try:
        importlib.import_module(peer.package)
        return _timed(peer, shape, device, dtype)
    except Exception as failed:
        return {"reason": reason(failed)}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(
    peer: Peer, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    layers = num_layers(sum(context for _, context in shape.rows) * token_bytes)
    with torch.inference_mode():
        case = Case.of(shape, page_size=peer.page_size, layers=layers, device=device, dtype=dtype)
        attend = peer.prepare(case)
        error = case.error(attend(0))
        return {
            **measure(attend, layers, device),
            "error": error,
            "page_size": peer.page_size,
        }


def _print_table(result: dict[str, Any]) -> None:
    table = Table("attention, us", *PEERS, title=result["device"], box=None)
    for row in result.get("shapes", ()):
        cells = (row["peers"].get(name, {}) for name in PEERS)
        table.add_row(
            row["shape"],
            *(f"{cell['seconds'] * 1e6:,.1f}" if "seconds" in cell else "" for cell in cells),
        )
    show(table)


def build_parser() -> argparse.ArgumentParser:
    parser = record_parser(
        "benchmarks.kernels.peers", "Attention of PyTorch and its neighbours at named shapes."
    )
    add = parser.add_argument
    add("--shapes", default="decode,prefill,mixed", help="as for benchmarks.kernels")
    add("--leave-out", default="", help="shapes to leave out, likewise")
    add("--peers", default=",".join(PEERS), help="some of them")
    add("--dtype", default="bfloat16", help="of queries and pages")
    add("--device", default=None, help="PyTorch's name; its GPU where it finds one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
