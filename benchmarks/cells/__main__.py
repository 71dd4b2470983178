"""Cellular batching against padding and merged graphs: `python -m benchmarks.cells --help`.

Prints one JSON object with latency, queueing and computing at swept rates, for every policy;
docs/benchmarks/cells.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

from benchmarks.cells import contenders
from benchmarks.cells.applications import (
    SIZES,
    WORKLOADS,
    CellRequest,
    Sizes,
    Workload,
    requests_of,
    simulated,
)
from benchmarks.cells.contenders import ThesisCost, batch_sizes_of, products
from benchmarks.cells.peers.options import OPTIONS as PEER_OPTIONS
from benchmarks.cells.peers.options import peers_of, run_peers
from benchmarks.cells.playing import compared, is_saturated, serve, simulate
from benchmarks.common.harness import Benchmark, Record, numbers, option, some_of
from benchmarks.common.repeats import in_turns, repeats, summary
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import parse_bytes
from jaxserve.workload.items import arrival_times
from jaxserve.workload.sentences import LONGEST, SentenceLengths, draw_treebank_lengths

COSTS = ("thesis", "measured", "none")
LENGTHS = ("wmt15", "treebank")
# Rates of a sweep, as shares of the rate at which all batches would be full.
_SHARES = "0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.2"
_WARM_REQUESTS = 16

# (policy, requests a second) -> figures; None for all requests at once.
Play = Callable[[str, float | None], dict[str, Any]]


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = _checked(options)
    peers = peers_of(options)
    sizes = SIZES[options.size]
    about = {"hidden_size": sizes.hidden_size, "vocab_size": sizes.vocab_size}
    record = Record.of(
        "cells", options, sizes={**about, "max_batch": dict(sizes.max_batch)}, points=[], task_s={}
    )
    for name in names:
        _Sweeps(name, options, record).play()
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


def _checked(options: argparse.Namespace) -> list[str]:
    """Return the workloads, if the options ask for something."""
    chosen = some_of(options.applications, "--applications", WORKLOADS)
    some_of(options.policies or contenders.OURS, "--policies", contenders.KNOWN)
    for name in ("num_requests", "compare_requests", "longest"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    parse_bytes(options.slot_memory)
    numbers(options.shares or _SHARES, "--shares")
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


@final
class _Sweeps:
    """The sweeps of one workload: simulated, and on the device."""

    def __init__(self, name: str, options: argparse.Namespace, record: Record):
        self._name, self._options, self._record = name, options, record
        self._workload = WORKLOADS[name]
        self._application = self._workload.application
        self._sizes = SIZES[options.size].limited(self._workload.max_batch)
        self._requests = _requests(self._workload, options, self._sizes)

    def play(self) -> None:
        options = self._options
        cost = None
        if options.costs == "measured" or options.measured:
            cost = self._measured_cost()
        if options.costs != "none":
            self._simulated(cost)
        if options.measured and self._workload.num_workers == 1:
            self._measured(cost)

    def _modelled(self, batch_sizes: dict[str, tuple[int, ...]]) -> Any:
        from benchmarks.cells.models import model_from, random_weights

        weights = random_weights(self._application, self._sizes, seed=0)
        return model_from(weights, batch_sizes, folds=False)

    def _measured_cost(self) -> Any:
        from jaxserve.cells.measure import measure_cells

        print(f"timing the cells of {self._name}", file=sys.stderr)
        policies = contenders.contenders_of(self._application)
        all_sizes = [batch_sizes_of(policy, self._sizes) for policy in policies]
        cells = self._sizes.max_batch
        largest = {cell: max((one[cell] for one in all_sizes), key=max) for cell in cells}
        # All tasks of one call take the same time; so the time is that of a task.
        cost = measure_cells(self._modelled(largest).cells)
        self._record.result["task_s"][self._name] = cost.seconds
        self._record.save()
        return cost

    def _arrivals(self, rate: float | None) -> list[float]:
        return arrival_times(len(self._requests), pattern(rate), self._options.seed)

    def _simulated(self, measured_cost: Any) -> None:
        sizes, num_workers = self._sizes, self._workload.num_workers

        def cost_of(policy: str) -> Any:
            if self._options.costs == "measured":
                return measured_cost
            return ThesisCost(products(sizes), gathers=policy in contenders.GATHERING)

        ideal = cost_of(contenders.IDEAL)
        cell_s = {cell: ideal.task_s(cell, 1) for cell in _cells(self._requests)}

        def play(policy: str, rate: float | None) -> dict[str, Any]:
            return simulate(
                simulated(self._application, batch_sizes_of(policy, sizes)),
                contenders.policy_of(policy, cell_s=cell_s),
                cost_of(policy),
                self._requests,
                self._arrivals(rate),
                num_workers=num_workers,
            )

        most = num_workers * capacity(self._requests, ideal, sizes)
        self._sweep(f"simulated, {self._options.costs}", play, most, repeats=1)

    def _measured(self, cost: Any) -> None:
        from jaxserve.cells import CellRuntime

        cell_s = {cell: cost.task_s(cell, 1) for cell in _cells(self._requests)}
        runtimes: dict[str, CellRuntime] = {}

        def play(policy: str, rate: float | None) -> dict[str, Any]:
            if policy not in runtimes:
                model = self._modelled(batch_sizes_of(policy, self._sizes))
                # Our runtime with its default policy.
                is_ours = policy == contenders.OURS
                chosen = None if is_ours else contenders.policy_of(policy, cell_s=cell_s)
                memory = self._options.slot_memory
                rt = CellRuntime(model.cells, model.unfold, policy=chosen, slot_memory=memory)
                runtimes[policy] = stack.enter_context(rt)
                rt.generate(self._requests[:_WARM_REQUESTS], progress=False)
            return serve(runtimes[policy], self._requests, self._arrivals(rate))

        with ExitStack() as stack:
            most = capacity(self._requests, cost, self._sizes)
            self._sweep("measured", play, most, repeats=self._options.repeats)

    def _sweep(self, how: str, play: Play, most: float, *, repeats: int) -> None:
        """Play all requests at once, and then at rising rates until each policy is saturated.

        Policies take turns. When all arrive at once, batches are as full as possible, which matters
        for buckets.
        """
        record, known = self._record, contenders.contenders_of(self._application)
        given = self._options.policies.split(",") if self._options.policies else known
        names = [name for name in given if name in (*known, *contenders.OTHERS)]
        shares = numbers(self._options.shares or _SHARES, "--shares")
        for rate in (None, *(share * most for share in shares)):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            is_spent = False
            for _, name in in_turns(names, repeats):
                label = f"{self._name}, {how}, {name}, {pattern(rate)}"
                is_spent = not record.allows(label)
                if is_spent:
                    break
                print(label, file=sys.stderr)
                try:
                    runs[name].append(play(name, rate))
                except Exception as error:
                    record.fail(label, error)
            about = {"application": self._name, "how": how, "rate": rate}
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


def _cells(requests: Sequence[CellRequest]) -> Counter[str]:
    found: Counter[str] = Counter()
    for request in requests:
        found.update(request.counts())
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
