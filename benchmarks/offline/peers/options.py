"""The option of a benchmark that runs peers beside it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.offline.peers.catalogue import GROUPS, PEERS, Peer, named
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.registry import resolve
from jaxserve.workload import WorkloadItem

PRECISION = "float32"
QUANTISED = ("int8", "int4", "keep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--compare`."""
    known = ", ".join([*GROUPS, *(name for name in PEERS if not name.startswith(tuple(GROUPS)))])
    parser.add_argument("--compare", default=None, help=f"peers, separated by commas: {known}")
    parser.add_argument(
        "--fewer-requests",
        default="",
        help="with --compare: also time only so many of the requests, such as 1,4",
    )


def peers_of(options: argparse.Namespace) -> dict[str, Peer]:
    """Return the peers of `--compare`; none without the option.

    Raises:
      InvalidConfigError: an unknown peer, or settings that the peers do not have.
    """
    if options.compare is None:
        return {}
    from jaxserve.execution.sizes import platform_defaults

    peers = named(options.compare)
    dtype = options.dtype or platform_defaults().dtype
    if dtype != PRECISION:
        raise InvalidConfigError(
            f"peers are compared in {PRECISION}, not {dtype}; add --dtype {PRECISION}"
        )
    if options.kv_dtype is not None:
        raise InvalidConfigError(
            f"peers are compared with keys and values in {PRECISION}, not {options.kv_dtype}; "
            "leave out --kv-dtype"
        )
    if options.quantize is not None:
        if options.quantize not in QUANTISED:
            raise InvalidConfigError(
                f"peers are compared with --quantize {', '.join(QUANTISED)}, not {options.quantize}"
            )
        lacking = sorted(n for n, peer in peers.items() if options.quantize not in peer.few_bits)
        if lacking:
            raise InvalidConfigError(
                f"--quantize {options.quantize}: {lacking} do not have such weights here; leave "
                "them out of --compare"
            )
    _fewer(options)
    if resolve(options.model).kind != "gguf" or options.load is not None:
        raise InvalidConfigError(
            "peers are compared on the weights of a GGUF file: give --model a registered name or "
            "such a file, and leave out --load"
        )
    return peers


def _fewer(options: argparse.Namespace) -> list[int]:
    """Return the numbers of requests of `--fewer-requests`.

    Raises:
      InvalidConfigError: one of them is not a number from 1 to all requests but one.
    """
    found = [each for each in options.fewer_requests.split(",") if each]
    if not all(each.isdecimal() and 0 < int(each) < options.num_requests for each in found):
        raise InvalidConfigError(
            f"--fewer-requests {options.fewer_requests}: pass numbers from 1 to "
            f"{options.num_requests - 1}, separated by commas"
        )
    return [int(each) for each in found]


def run_peers(
    options: argparse.Namespace,
    peers: Mapping[str, Peer],
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    settings: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Run the comparison and print its table on stderr; return None without peers."""
    if not peers:
        return None
    from benchmarks.offline.peers.compare import compare, print_table

    result = compare(
        peers,
        resolve(options.model).path,
        items,
        batch_size=batch_size,
        repeats=options.repeats,
        settings={**settings, "dtype": PRECISION, "max_slots": batch_size},
        fewer=_fewer(options),
    )
    print_table(result)
    return {"precision": PRECISION, "quantize": options.quantize, **result}


def any_failed(comparison: Mapping[str, Any] | None) -> bool:
    """Return whether an engine could not be installed or run."""
    engines = comparison["engines"].values() if comparison else ()
    return any(engine["error"] is not None for engine in engines)
