"""The tiling for a model on a device, from the table beside this file."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal

from pallas_kernels import dispatch
from pallas_kernels.cross import H100_CORES
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.planner import Launch, Launches, Tiling, Warpgroups

_TABLE = Path(__file__).with_name("tilings.toml")


def tiling_for(
    *,
    device: str,
    num_cores: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    kind: Literal["triton", "mosaic"] = "triton",
) -> Tiling:
    """How the kernels cut attention of these heads.

    Args:
      device: its name, such as "NVIDIA H100 80GB HBM3".
      num_cores: its multiprocessors.
      kv_heads: of the cache, on one device.
      group: query heads a KV head.
      kind: whose tiles; Triton's tile kernel can serve Mosaic's too.

    Raises:
      NotImplementedError: no entry has heads of this size.
    """
    for entry in _entries(kind):
        if entry["device"] in device and head_dim <= entry["max_head_dim"]:
            break
    else:
        raise NotImplementedError(f"no tiling for heads of {head_dim} on {device}")
    split_rows = max(entry["split"]["rows"], 1 << (group - 1).bit_length())
    warpgroups = entry.get("warpgroups")
    return Tiling(
        kv_heads=kv_heads,
        group=group,
        split_rows=split_rows,
        tile_rows=max(entry["tile"]["rows"], split_rows),
        chunk_keys=entry["chunk_keys"],
        split_programs=entry["split"]["programs"] * num_cores,
        tile_programs=entry["tile"]["programs"] * num_cores,
        launches=_launches(entry),
        masked_launches=_launches(entry, "masked"),
        float32_launches=_launches(entry, "float32"),
        warpgroups=None if warpgroups is None else Warpgroups(**warpgroups),
    )


def planned_tiling(device: Any, implementation: str | None = None, **heads: int) -> Tiling | None:
    """The tiling of a model on a JAX device; None where no kernel works through plans.

    Args:
      implementation: that was asked for, or several; None for the platform's choice.
      heads: kv_heads, group and head_dim, as `tiling_for` has them.
    """
    names = ("triton",) if implementation is None else tuple(implementation.split(","))
    kinds = [name.removesuffix("_interpreted") for name in names]
    if not {"triton", "mosaic"} & set(kinds):
        return None
    if kinds != list(names):
        num_cores = 1
    elif dispatch.target_platform() == "cuda":
        num_cores = getattr(device, "core_count", H100_CORES)
    else:
        return None
    is_mosaic = kinds[0] == "mosaic" and mosaic.serves(heads["group"], heads["head_dim"])
    kind = "mosaic" if is_mosaic else "triton"
    return tiling_for(device=device.device_kind, num_cores=num_cores, kind=kind, **heads)


def _launches(entry: dict[str, Any], case: str = "") -> Launches:
    """An entry's, with what differs in a case."""
    chosen = entry | entry.get(case, {})
    kernels = {
        kernel: Launch(num_warps=chosen[kernel]["warps"], num_stages=chosen[kernel]["stages"])
        for kernel in ("tile", "split", "merge")
    }
    return Launches(block_keys=chosen["block_keys"], **kernels)


@functools.cache
def _entries(kind: str) -> list[dict[str, Any]]:
    return tomllib.loads(_TABLE.read_text())[kind]
