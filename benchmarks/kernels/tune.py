"""The fastest tiles of attention on this GPU: `python -m benchmarks.kernels.tune --help`.

Each size in turn takes every one of its values while the other sizes stay, and keeps the fastest; a
value that does not compile is skipped. The result is compared with float32 and then written to
`pallas_kernels/paged_attention/tuned_tilings.toml`, which runtimes read.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, Record, option, reason, sizes_of
from benchmarks.kernels.timing import Attention, num_layers
from jaxserve.core.errors import InvalidConfigError, JaxserveError
from jaxserve.kernels.paged_attention.shapes import AttentionShape
from jaxserve.kernels.paged_attention.tilings import TUNED, Entry, cores_of, entry_for, tiling_of

# Values by their place in an entry, in the order in which they are tried.
Values = Mapping[tuple[str, ...], Sequence[int]]

_SPLIT: Values = {
    ("block_keys",): (32, 64, 128),
    ("split", "programs"): (2, 3, 4, 6, 8),
    ("split", "stages"): (2, 3, 4),
    ("split", "warps"): (2, 4, 8),
    ("split_keys",): (256, 512, 1024),
    ("merge", "warps"): (2, 4, 8),
}
_TILE: Values = {
    ("tile", "rows"): (64, 128),
    ("tile", "warps"): (4, 8),
    ("tile", "stages"): (2, 3, 4),
    ("tile", "programs"): (1, 2, 3),
}
_WARPGROUPS: Values = {
    ("warpgroups", "block_keys"): (64, 128),
    ("warpgroups", "num_stages"): (2, 3, 4),
}
_MAX_ERROR = 1e-2
# Fields of an entry that name its device and heads, and those that say where it comes from.
_OWNER = ("device", "group", "head_dim")
_ABOUT = (*_OWNER, "max_head_dim", "source", "command")
_HEADER = """\
# Tiles that were timed, by device and heads; looked up before tilings.toml.
# Written by `python -m benchmarks.kernels.tune`; each entry has the command that made it.
"""


class WrongTilesError(JaxserveError):
    """The fastest tiles give wrong numbers and are not written."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    kv_heads, group, head_dim = sizes_of(options.heads, "--heads", "8x4x128")
    device, dtype = jax.devices()[0], jnp.dtype("bfloat16")
    if device.platform != "gpu":
        raise InvalidConfigError("tiles are tuned on the GPU that they are for; there is none here")
    heads = dict(num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim, page_size=32)
    start = entry_for(device=device.device_kind, group=group, head_dim=head_dim, kind=options.kind)
    record = Record.of("tune", options, kind=options.kind, heads=options.heads, tried=[])

    def tiling(entry: Entry) -> Any:
        return tiling_of(entry, num_cores=cores_of(device), kv_heads=kv_heads, group=group)

    def tuned(entry: Entry, values: Values, shapes: Sequence[AttentionShape]) -> Entry:
        given = []
        for shape in shapes:
            layers = num_layers(shape, dtype)
            given.append(Attention.of(shape, dtype, dtype, layers, options.kind))

        def tiled(entry: Entry) -> list[Attention]:
            return [replace(each, tiling=tiling(entry)) for each in given]

        entry = descend(entry, values, lambda e: [each.seconds() for each in tiled(e)], record)
        errors = [each.error() for each in tiled(entry)]
        if not all(error <= _MAX_ERROR for error in errors):  # also false for NaN
            raise WrongTilesError(f"relative errors {errors}; nothing was written")
        return entry

    best = start
    if options.kind == "triton":
        decode = [
            AttentionShape(name=f"decode_{rows}x{context}", rows=((1, context),) * rows, **heads)
            for rows, context in ((32, 4096), (128, 2048), (1, 16384))
        ]
        best = tuned(best, _SPLIT, decode)
    prefill = AttentionShape(name="prefill_4096", rows=((4096, 4096),), **heads)
    best = tuned(best, _TILE if options.kind == "triton" else _WARPGROUPS, [prefill])
    entry = {
        "device": device.device_kind,
        "group": group,
        "head_dim": head_dim,
        "source": f"timed, commit {environment.commit()}, JAX {jax.__version__}",
        "command": shlex.join(["python", "-m", "benchmarks.kernels.tune", *sys.argv[1:]]),
        **{name: value for name, value in best.items() if name not in _ABOUT},
    }
    record.result["best"] = entry
    write_entry(options.table, options.kind, entry)
    return record.result


def descend(
    entry: Entry, values: Values, seconds: Callable[[Entry], Sequence[float]], record: Record
) -> Entry:
    """Return the entry with the fastest values, found for one place after the other.

    Args:
      seconds: returns the seconds of an entry at every shape. The score of an entry is the sum of
        its seconds over those of the first entry.
      record: gets every value that was tried; no value is tried once its budget is used up.
    """
    begin = seconds(entry)
    best, best_score = entry, float(len(begin))
    for place, candidates in values.items():
        for value in candidates:
            changed = _with(best, place, value)
            if changed == best:
                continue
            name = ".".join(place)
            if not record.allows(f"{name}={value}"):
                continue
            try:
                times = seconds(changed)
            except Exception as error:  # mostly a tile that does not compile
                record.result["tried"].append(
                    {"place": name, "value": value, "reason": reason(error)}
                )
                continue
            score = sum(own / first for own, first in zip(times, begin, strict=True))
            record.result["tried"].append(
                {"place": name, "value": value, "seconds": list(times), "score": score}
            )
            record.save()
            if score < best_score:
                best, best_score = changed, score
    return best


def write_entry(path: Path, kind: str, entry: Entry) -> None:
    """Write an entry to a table; it replaces the entry of the same heads on the same device."""
    table = tomllib.loads(path.read_text()) if path.exists() else {}
    kept = [
        each
        for each in table.get(kind, [])
        if [each.get(name) for name in _OWNER] != [entry[name] for name in _OWNER]
    ]
    table[kind] = [entry, *kept]
    lines = [_HEADER]
    for name in sorted(table):
        for each in table[name]:
            lines.append(f"[[{name}]]")
            lines += [f"{key} = {_toml(value)}" for key, value in each.items()]
            lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


def _with(entry: Entry, place: tuple[str, ...], value: int) -> Entry:
    changed = copy.deepcopy(entry)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return changed


OPTIONS = (
    option("--kind", "triton", "the kernels whose tiles are tuned", choices=("triton", "mosaic")),
    option("--heads", "8x4x128", "KV heads, query heads for each, and their size"),
    option("--table", TUNED, "the file to write", Path),
)
main = Benchmark(__doc__, run, OPTIONS, "tune", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
