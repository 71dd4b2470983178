"""Cellular batching against padding and merged graphs: `python -m benchmarks.cells --help`.

Prints one JSON object with latency, queueing and computing at swept rates, for every policy;
docs/benchmarks/cells.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.cells import contenders
from benchmarks.cells.applications import (
    SIZES,
    WORKLOADS,
    CellRequest,
    Sizes,
    Workload,
    modelled,
    requests_of,
    simulated,
)
from benchmarks.cells.contenders import ThesisCost, products
from benchmarks.cells.peers.options import OPTIONS as PEER_OPTIONS
from benchmarks.cells.peers.options import peers_of, run_peers
from benchmarks.cells.playing import compared, is_saturated, serve, simulate, warm
from benchmarks.common.harness import Benchmark, Record, numbers, option
from benchmarks.common.repeats import in_turns, repeats, summary
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import parse_bytes
from jaxserve.workload.items import arrival_times
from jaxserve.workload.sentences import LONGEST, SentenceLengths, draw_treebank_lengths

COSTS = ("thesis", "measured", "none")
LENGTHS = ("wmt15", "treebank")
# Rates of a sweep, as shares of the rate at which all batches would be full.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
_WARM_REQUESTS = 16

# (policy, requests a second) -> figures; None for all requests at once.
Play = Callable[[str, float | None], dict[str, Any]]


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = _chosen(options)
    peers = peers_of(options)
    sizes = SIZES[options.size]
    record = Record.of(
        "cells",
        options,
        sizes={
            "hidden_size": sizes.hidden_size,
            "vocab_size": sizes.vocab_size,
            "max_batch": dict(sizes.max_batch),
        },
        points=[],
        task_s={},
    )
    for name in names:
        workload = WORKLOADS[name]
        own = sizes.limited(workload.max_batch)
        requests = _requests(workload, options, own)
        cost = _measured_cost(name, workload.application, options, own, record)
        if options.costs != "none":
            _sweep_simulated(name, workload, options, own, requests, cost, record)
        if options.measured and workload.num_workers == 1:
            _sweep_measured(name, workload.application, options, own, requests, cost, record)
    if peers:
        requests = {
            name: _requests(WORKLOADS[name], options, sizes)
            for name in names
            if WORKLOADS[name].application == name
        }
        record.result["compare"] = run_peers(requests, options, peers, sizes, record)
    record.result["compared"] = _comparisons(record.result["points"])
    record.save()
    return record.result


def _chosen(options: argparse.Namespace) -> list[str]:
    chosen = options.applications.split(",")
    for unknown, known in (
        ([name for name in chosen if name not in WORKLOADS], WORKLOADS),
        (
            contenders.unknown(options.policies.split(",") if options.policies else []),
            contenders.KNOWN,
        ),
    ):
        if unknown:
            raise InvalidConfigError(f"{unknown} are unknown; pass some of {', '.join(known)}")
    for name in ("num_requests", "compare_requests", "longest"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    parse_bytes(options.slot_memory)
    _shares(options)
    if options.costs == "none" and not options.measured and options.compare is None:
        raise InvalidConfigError("nothing is to be done; pass --costs, --measured or --compare")
    return chosen


def _requests(workload: Workload, options: argparse.Namespace, sizes: Sizes) -> list[CellRequest]:
    num, seed = options.num_requests, options.seed
    if workload.length is not None:
        lengths = [workload.length] * num
    elif options.lengths == "treebank" and workload.longest is None:
        lengths = draw_treebank_lengths(num, seed)
    else:
        lengths = SentenceLengths(workload.longest or options.longest).draw(num, seed)
    return requests_of(workload.application, lengths, vocab_size=sizes.vocab_size, seed=seed)


def _measured_cost(
    name: str, application: str, options: argparse.Namespace, sizes: Sizes, record: Record
) -> Any:
    if options.costs != "measured" and not options.measured:
        return None
    from jaxserve.cells.measure import measure_cells

    print(f"timing the cells of {name}", file=sys.stderr)
    policies = contenders.contenders_of(application)
    all_sizes = [contenders.batch_sizes_of(policy, sizes) for policy in policies]
    largest = {cell: max((one[cell] for one in all_sizes), key=max) for cell in sizes.max_batch}
    # All tasks of one call take the same time; so the time is that of a task.
    cost = measure_cells(modelled(application, sizes, largest).cells)
    record.result["task_s"][name] = cost.seconds
    record.save()
    return cost


def _sweep_simulated(
    name: str,
    workload: Workload,
    options: argparse.Namespace,
    sizes: Sizes,
    requests: Sequence[CellRequest],
    measured_cost: Any,
    record: Record,
) -> None:
    def cost_of(policy: str) -> Any:
        if options.costs == "measured":
            return measured_cost
        return ThesisCost(products(sizes), gathers=policy in contenders.GATHERING)

    ideal = cost_of(contenders.IDEAL)
    cell_s = {cell: ideal.task_s(cell, 1) for cell in _cells(requests)}

    def play(policy: str, rate: float | None) -> dict[str, Any]:
        return simulate(
            simulated(workload.application, contenders.batch_sizes_of(policy, sizes)),
            contenders.policy_of(policy, cell_s=cell_s),
            cost_of(policy),
            requests,
            arrival_times(len(requests), pattern(rate), options.seed),
            num_workers=workload.num_workers,
        )

    most = workload.num_workers * capacity(requests, ideal, sizes)
    how = f"simulated, {options.costs}"
    _sweep(name, workload.application, how, play, most, options, record, repeats=1)


def _sweep_measured(
    name: str,
    application: str,
    options: argparse.Namespace,
    sizes: Sizes,
    requests: Sequence[CellRequest],
    measured_cost: Any,
    record: Record,
) -> None:
    from jaxserve.cells import CellRuntime

    cell_s = {cell: measured_cost.task_s(cell, 1) for cell in _cells(requests)}
    with ExitStack() as stack:
        runtimes: dict[str, Any] = {}

        def play(policy: str, rate: float | None) -> dict[str, Any]:
            if policy not in runtimes:
                model = modelled(application, sizes, contenders.batch_sizes_of(policy, sizes))
                # Our runtime with its default policy.
                is_ours = policy == contenders.OURS
                chosen = None if is_ours else contenders.policy_of(policy, cell_s=cell_s)
                runtimes[policy] = stack.enter_context(
                    CellRuntime(
                        model.cells, model.unfold, policy=chosen, slot_memory=options.slot_memory
                    )
                )
                warm(runtimes[policy], requests[:_WARM_REQUESTS])
            arrivals = arrival_times(len(requests), pattern(rate), options.seed)
            return serve(runtimes[policy], requests, arrivals)

        most = capacity(requests, measured_cost, sizes)
        _sweep(name, application, "measured", play, most, options, record, repeats=options.repeats)


def _sweep(
    workload: str,
    application: str,
    how: str,
    play: Play,
    most: float,
    options: argparse.Namespace,
    record: Record,
    *,
    repeats: int,
) -> None:
    """Play all requests at once, and then at rising rates until each policy is saturated.

    Policies take turns. When all arrive at once, batches are as full as possible, which matters for
    buckets.
    """
    given = options.policies.split(",") if options.policies else None
    names = [
        name
        for name in given or contenders.contenders_of(application)
        if name in (*contenders.contenders_of(application), *contenders.OTHERS)
    ]
    shares = _shares(options)
    for rate in (None, *(share * most for share in shares)):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        is_spent = False
        for _, name in in_turns(names, repeats):
            label = f"{workload}, {how}, {name}, {pattern(rate)}"
            is_spent = record.is_spent
            if is_spent:
                record.skip(label)
                break
            print(label, file=sys.stderr)
            try:
                runs[name].append(play(name, rate))
            except Exception as error:
                record.fail(label, error)
        about = {"application": workload, "how": how, "rate": rate}
        points: list[dict[str, Any]] = [
            {**about, "policy": name, **(summary(own) if repeats > 1 else own[0])}
            for name, own in runs.items()
            if own
        ]
        record.result["points"] += points
        record.save()
        names = [point["policy"] for point in points if not is_saturated(point)]
        if is_spent or not names:
            return


def _shares(options: argparse.Namespace) -> Sequence[float]:
    if not options.shares:
        return _SHARES
    return numbers(options.shares, "--shares")


def pattern(rate: float | None) -> str:
    """Return the arrivals at a rate; see `arrival_times`."""
    return "all" if rate is None else f"poisson:{rate:.6g}"


def capacity(requests: Sequence[CellRequest], cost: Any, sizes: Sizes) -> float:
    """Return the requests a second that a device would serve if every task were full."""
    seconds = sum(
        num * cost.task_s(cell, sizes.max_batch[cell]) / sizes.max_batch[cell]
        for cell, num in _cells(requests).items()
    )
    return len(requests) / seconds


def _cells(requests: Sequence[CellRequest]) -> dict[str, int]:
    found: dict[str, int] = {}
    for request in requests:
        for cell, num in request.counts().items():
            found[cell] = found.get(cell, 0) + num
    return found


def _comparisons(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for application, how in dict.fromkeys((p["application"], p["how"]) for p in points):
        own = [p for p in points if (p["application"], p["how"]) == (application, how)]
        if any(point["policy"] == contenders.OURS for point in own):
            entry = compared(own, contenders.OURS, without=(contenders.IDEAL,))
            found.append({"application": application, "how": how, **entry})
    return found


OPTIONS = (
    option("--applications", ",".join(WORKLOADS), "some of them, with commas"),
    option("--lengths", "wmt15", "of sentences: fitted, or real text", choices=LENGTHS),
    option("--longest", LONGEST, "wmt15: longer sentences are left out"),
    option("--num-requests", 10_000, "of each run"),
    option("--seed", 0, "of lengths, trees, tokens and arrivals"),
    option("--size", "thesis", "hidden size 1024, or 128", choices=tuple(SIZES)),
    option("--costs", "thesis", "of the simulation: the thesis's GPU, this device", choices=COSTS),
    option("--measured", False, "also run on the device"),
    option("--slot-memory", "256MiB", "of live values on the device; requests wait for slots"),
    option("--policies", None, "with commas; by default those of the thesis"),
    option("--shares", None, "rates, as shares of the rate with full batches alone, with commas"),
    repeats("policy on the device"),
    *PEER_OPTIONS,
)
main = Benchmark(__doc__, run, OPTIONS, "cells", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
