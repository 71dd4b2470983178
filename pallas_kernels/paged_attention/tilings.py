"""The tiling for a model on a device, from the tables beside this file.

`tuned_tilings.toml` has what was timed on a device for heads of one kind
(`benchmarks.kernels.tune`), and
goes first; `tilings.toml` has something for everybody.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal

from pallas_kernels import dispatch
from pallas_kernels.cross import H100_CORES
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.planner import Launch, Launches, Tiling, Warpgroups

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
    entry = entry_for(device=device, group=group, head_dim=head_dim, kind=kind)
    return tiling_of(entry, num_cores=num_cores, kv_heads=kv_heads, group=group)


def entry_for(
    *, device: str, group: int, head_dim: int, kind: Literal["triton", "mosaic"]
) -> Entry:
    """The first entry that such heads on such a device fit; see `tiling_for`.

    Raises:
      NotImplementedError: there is none.
    """
    for entry in (*_entries(TUNED, kind), *_entries(_TABLE, kind)):
        is_its_own = (
            entry.get("group", group) == group and entry.get("head_dim", head_dim) == head_dim
        )
        fits = head_dim <= entry.get("max_head_dim", head_dim)
        if is_its_own and fits and entry["device"] in device:
            return entry
    raise NotImplementedError(f"no tiling for heads of {head_dim} on {device}")


def tiling_of(entry: Entry, *, num_cores: int, kv_heads: int, group: int) -> Tiling:
    """What an entry comes to for a model."""
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


def planned_tiling(
    device: Any,
    implementation: str | None = None,
    *,
    dtype: str,
    page_dtype: str,
    **heads: int,
) -> Tiling | None:
    """The tiling of a model on a JAX device; None where no kernel works through plans.

    Args:
      implementation: that was asked for, or several; None for the platform's choice.
      dtype, page_dtype: of queries and pages.
      heads: kv_heads, group and head_dim, as `tiling_for` has them.
    """
    names = ("triton",) if implementation is None else tuple(implementation.split(","))
    kinds = [name.removesuffix("_interpreted") for name in names]
    if not {"triton", "mosaic"} & set(kinds):
        return None
    if kinds == list(names) and dispatch.target_platform() != "cuda":
        return None
    num_cores = 1 if kinds != list(names) else cores_of(device)
    is_mosaic = kinds[0] == "mosaic" and mosaic.serves(
        heads["group"], heads["head_dim"], dtype, page_dtype
    )
    kind = "mosaic" if is_mosaic else "triton"
    return tiling_for(device=device.device_kind, num_cores=num_cores, kind=kind, **heads)


def is_tuned(device: str) -> bool:
    """Whether there are entries of such a device that were timed."""
    entries = (*_entries(TUNED, "triton"), *_entries(TUNED, "mosaic"))
    return any(entry["device"] in device for entry in entries)


def cores_of(device: Any) -> int:
    """Multiprocessors of a JAX device; of an H100 where it does not say."""
    return getattr(device, "core_count", H100_CORES)


def _launches(entry: Entry, case: str = "") -> Launches:
    """An entry's, with what differs in a case."""
    chosen = entry | entry.get(case, {})
    kernels = {
        kernel: Launch(num_warps=chosen[kernel]["warps"], num_stages=chosen[kernel]["stages"])
        for kernel in ("tile", "split", "merge")
    }
    return Launches(block_keys=chosen["block_keys"], **kernels)


@functools.cache
def _entries(path: Path, kind: str) -> list[Entry]:
    return tomllib.loads(path.read_text()).get(kind, []) if path.exists() else []
