"""How a benchmark's command line asks for peers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.catalogue import GROUPS, PEERS, Peer, named
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.registry import resolve
from jaxserve.workload import WorkloadItem

PRECISION = "float32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--compare` and `--repeats`."""
    known = ", ".join([*GROUPS, *(name for name in PEERS if not name.startswith(tuple(GROUPS)))])
    parser.add_argument("--compare", default=None, help=f"peers, separated by commas: {known}")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="compare: interleaved runs, of which the median counts",
    )


def peers_of(options: argparse.Namespace) -> dict[str, Peer]:
    """The peers asked for; none without `--compare`.

    Raises:
      InvalidConfigError: an unknown peer, or settings under which peers cannot be compared with.
    """
    if options.compare is None:
        return {}
    from jaxserve.execution.build import platform_defaults

    peers = named(options.compare)
    dtype = options.dtype or platform_defaults().dtype
    if dtype != PRECISION:
        raise InvalidConfigError(
            f"peers are compared in {PRECISION}, not {dtype}; add --dtype {PRECISION}"
        )
    if options.kv_dtype is not None:
        raise InvalidConfigError(
            f"peers are compared with keys and values in {PRECISION}, not {options.kv_dtype}; "
            "leave --kv-dtype away"
        )
    if resolve(options.model).kind != "gguf" or options.load is not None:
        raise InvalidConfigError(
            "peers are compared on the weights of a GGUF file: give --model a registered name or "
            "such a file, and leave --load away"
        )
    if options.repeats < 1:
        raise InvalidConfigError(f"--repeats is {options.repeats}; it must be at least 1")
    return peers


def run_peers(
    options: argparse.Namespace,
    peers: Mapping[str, Peer],
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    settings: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The comparison, also as a table on stderr; None without peers."""
    if not peers:
        return None
    from benchmarks.peers.compare import compare, print_table

    result = compare(
        peers,
        resolve(options.model).path,
        items,
        batch_size=batch_size,
        repeats=options.repeats,
        settings={**settings, "dtype": PRECISION, "max_slots": batch_size},
    )
    print_table(result)
    return {"precision": PRECISION, **result}


def any_failed(comparison: Mapping[str, Any] | None) -> bool:
    """Whether an engine of it could not be installed or run."""
    engines = comparison["engines"].values() if comparison else ()
    return any(engine["error"] is not None for engine in engines)
