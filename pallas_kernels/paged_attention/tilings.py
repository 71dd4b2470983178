"""Tilings of models on devices, from the tables in this folder.

`tuned_tilings.toml` holds tilings that were timed on a device for heads of one kind
(`benchmarks.kernels.tune`), and comes first. `tilings.toml` has an entry for every device.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jaxserve.kernels import dispatch
from jaxserve.kernels.gpu import GPUS, Gpu
from jaxserve.kernels.paged_attention import mosaic
from jaxserve.kernels.paged_attention.planner import Launch, Launches, Tiling, Warpgroups

TUNED = Path(__file__).with_name("tuned_tilings.toml")
_TABLE = Path(__file__).with_name("tilings.toml")

# An entry of a table.
Entry = dict[str, Any]


def tiling_for(
    *,
    device: str,
    num_cores: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    kind: Literal["triton", "mosaic"] = "triton",
    chunk_invariant: bool = False,
) -> Tiling:
    """Return the tiling of these heads on a device.

    Args:
      device: device name, such as "NVIDIA H100 80GB HBM3".
      num_cores: number of multiprocessors of the device.
      kv_heads, group, chunk_invariant: see `Tiling`.
      kind: the kernel that the tiles are for; Triton's tile kernel also serves Mosaic's tiles.

    Raises:
      NotImplementedError: no entry has heads of this size.
    """
    entry = entry_for(
        device=device, group=group, head_dim=head_dim, kind=kind, chunk_invariant=chunk_invariant
    )
    tiling = tiling_of(entry, num_cores=num_cores, kv_heads=kv_heads, group=group)
    return replace(tiling, chunk_invariant=chunk_invariant)


def entry_for(
    *,
    device: str,
    group: int,
    head_dim: int,
    kind: Literal["triton", "mosaic"],
    chunk_invariant: bool = False,
) -> Entry:
    """Return the first entry that fits these heads and this device; see `tiling_for`.

    With `chunk_invariant`, the entry must have a part of this name, which overrides the rest.
    """
    for entry in (*_entries(TUNED, kind), *_entries(_TABLE, kind)):
        has_heads = (
            entry.get("group", group) == group and entry.get("head_dim", head_dim) == head_dim
        )
        fits = head_dim <= entry.get("max_head_dim", head_dim)
        part = entry.get("chunk_invariant", {})
        if has_heads and fits and entry["device"] in device and (part or not chunk_invariant):
            return entry | part if chunk_invariant else entry
    raise NotImplementedError(f"there is no tiling for head_dim {head_dim} on {device}")


def tiling_of(entry: Entry, *, num_cores: int, kv_heads: int, group: int) -> Tiling:
    split_rows = max(entry["split"]["rows"], 1 << (group - 1).bit_length())
    warpgroups = entry.get("warpgroups")
    return Tiling(
        kv_heads=kv_heads,
        group=group,
        split_rows=split_rows,
        tile_rows=max(entry["tile"]["rows"], split_rows),
        split_keys=entry["split_keys"],
        split_programs=entry["split"]["programs"] * num_cores,
        tile_programs=entry["tile"]["programs"] * num_cores,
        launches=_launches(entry),
        masked_launches=_launches(entry, "masked"),
        float32_launches=_launches(entry, "float32"),
        warpgroups=None if warpgroups is None else Warpgroups(**warpgroups),
    )


def planned_tiling(
    device: Any,
    implementation: str | None = None,
    *,
    dtype: str,
    page_dtype: str,
    chunk_invariant: bool = False,
    **heads: int,
) -> Tiling | None:
    """Return the tiling of a model on a JAX device; None if no kernel there needs a plan.

    XLA serves heads without a tiling, unless kernels are asked for by name.

    `implementation` is as in `paged_attention`; queries have `dtype`, pages have `page_dtype`;
    `heads` are kv_heads, group and head_dim, see `tiling_for`.
    """
    names = ("triton",) if implementation is None else tuple(implementation.split(","))
    kinds = [name.removesuffix("_interpreted") for name in names]
    if not {"triton", "mosaic"} & set(kinds):
        return None
    if kinds == list(names) and dispatch.target_platform() != "cuda":
        return None
    num_cores = 1 if kinds != list(names) else cores_of(device)
    gpu = Gpu.of(device)
    is_mosaic = (
        kinds[0] == "mosaic"
        and (gpu is None or gpu.has_mosaic)  # interpreted on other platforms
        and mosaic.serves(heads["group"], heads["head_dim"], dtype, page_dtype)
    )
    try:
        return tiling_for(
            device=device.device_kind,
            num_cores=num_cores,
            kind="mosaic" if is_mosaic else "triton",
            chunk_invariant=chunk_invariant,
            **heads,
        )
    except NotImplementedError:
        if implementation is not None and "xla" not in names:
            raise
        return None


def is_tuned(device: str) -> bool:
    """Return whether there are timed entries for the device."""
    entries = (*_entries(TUNED, "triton"), *_entries(TUNED, "mosaic"))
    return any(entry["device"] in device for entry in entries)


def cores_of(device: Any) -> int:
    """Return the number of multiprocessors of a JAX device; an H100's if JAX does not report it."""
    return getattr(device, "core_count", GPUS["h100"].num_cores)


def _launches(entry: Entry, case: str = "") -> Launches:
    """Return an entry's launches, with the overrides of a case such as "masked"."""
    chosen = entry | entry.get(case, {})
    kernels = {
        kernel: Launch(num_warps=chosen[kernel]["warps"], num_stages=chosen[kernel]["stages"])
        for kernel in ("tile", "split", "merge")
    }
    return Launches(block_keys=chosen["block_keys"], **kernels)


@functools.cache
def _entries(path: Path, kind: str) -> list[Entry]:
    return tomllib.loads(path.read_text()).get(kind, []) if path.exists() else []
