"""The policies of a sweep, and the compiled batch sizes of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from benchmarks.cells.applications import Sizes
from jaxserve.cells import BatchMaker
from jaxserve.cells.policies import GraphMerging, IdenticalGraphs, LazyBatching, OneAtATime, Padding
from jaxserve.core.errors import InvalidConfigError

OURS = "batchmaker"
# Ours with as many tasks submitted together as the thesis has (2.4.3).
_OF_THESIS, _TASKS_OF_THESIS = "batchmaker_5", 5
_CHAINS = {"padding_1": 1, "padding_10": 10, "padding_40": 40}
_MERGED: dict[str, Literal["agenda", "depth"]] = {
    "merged_by_agenda": "agenda",
    "merged_by_depth": "depth",
}
# Policies whose tasks have rows from several places. DyNet and Fold also copy the operands of a
# merged batch to adjacent places (Neubig et al., 2017; Looks et al., 2017).
GATHERING = (OURS, _OF_THESIS, "lazy_batching", *_MERGED)
OF_CHAINS = (OURS, "padding_10", "padding_1", "padding_40", "lazy_batching")
OF_TREES = (OURS, "merged_by_agenda", "merged_by_depth", "lazy_batching")
# The ideal is not a baseline: a user whose graphs are all equal could write it down.
IDEAL = "identical_graphs"
OTHERS = (_OF_THESIS, "one_at_a_time")
KNOWN = tuple(dict.fromkeys([*OF_CHAINS, *OF_TREES, IDEAL, *OTHERS]))
# Graphs that DyNet and Fold merge at once (2.7.5), and the most cells of a merged batch.
_MERGED_GRAPHS, _MERGED_CELLS = 64, 2048
# The 90th percentile of the answers' lengths, since LazyBatching's paper takes a high one; and the
# mean length of sentences.
_DECODER_STEPS, _MEAN_CELLS = 50, 24
# LazyBatching adds the times of all requests as if each ran alone. This number of requests should
# keep its target; with the paper's 100 ms, about five sentences of Seq2Seq would.
_LAZY_REQUESTS, _LAZY_TARGET_S = 64, 0.1


def contenders_of(application: str) -> tuple[str, ...]:
    """Return the policies that the thesis compares on an application, and LazyBatching."""
    if application in ("lstm", "seq2seq"):
        return OF_CHAINS
    return (*OF_TREES, IDEAL) if application == "identical_trees" else OF_TREES


def policy_of(name: str, *, cell_s: Mapping[str, float]) -> Any:
    """Return a policy for a simulation.

    BatchMaker submits one task at a time there: a device needs enough tasks ahead to cover the
    host's time, which is included in the tasks' times.

    Args:
      cell_s: seconds of a cell alone, which LazyBatching estimates with.
    """
    if name in (OURS, _OF_THESIS):
        return BatchMaker(max_tasks_to_submit=1 if name == OURS else _TASKS_OF_THESIS)
    if name in _CHAINS:
        return Padding(bucket_width=_CHAINS[name])
    if name in _MERGED:
        return GraphMerging(order=_MERGED[name], max_graphs=_MERGED_GRAPHS)
    if name == "lazy_batching":
        num_cells = {cell: _DECODER_STEPS if cell == "decoder" else _MEAN_CELLS for cell in cell_s}
        alone_s = sum(num_cells[cell] * seconds for cell, seconds in cell_s.items())
        return LazyBatching(
            target_s=max(_LAZY_TARGET_S, _LAZY_REQUESTS * alone_s),
            cell_s=cell_s,
            expected_steps=_DECODER_STEPS,
        )
    if name == IDEAL:
        return IdenticalGraphs()
    if name == "one_at_a_time":
        return OneAtATime()
    raise InvalidConfigError(f"policy {name!r} is unknown; pass some of {', '.join(KNOWN)}")


def batch_sizes_of(name: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the compiled sizes of each cell under a policy: powers of two.

    Merged graphs may have batches of more cells than other policies, as in the thesis.
    """
    if name in _MERGED:
        return {cell: powers(_MERGED_CELLS) for cell in sizes.max_batch}
    return {cell: powers(most) for cell, most in sizes.max_batch.items()}


def powers(most: int) -> tuple[int, ...]:
    found = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*found, most)


# The thesis's V100 computes a step of an LSTM of 1024 for 64 rows in 185 us and for 512 in 784 us
# (2.7.3); below 64 rows the time does not change (figure 2.3).
_FLOOR_S, _FULL_S, _FULL_BATCH = 185e-6, 784e-6, 512
# With scheduling and gathering a step takes 250 us at 64 rows, and 87 % of the throughput is left
# at 512 (2.7.3).
_GATHER_S = {64: 250e-6 - _FLOOR_S, _FULL_BATCH: _FULL_S / 0.87 - _FULL_S}


def products(sizes: Sizes) -> dict[str, int]:
    """Return the floating-point operations of each cell's products for one row."""
    h = sizes.hidden_size
    lstm = 2 * 2 * h * 4 * h
    return {
        "lstm": lstm,
        "encoder": lstm,
        "decoder": lstm + 2 * h * sizes.vocab_size,
        "leaf": 2 * h * 3 * h,
        "internal": 2 * 2 * h * 5 * h,
    }


@final
@dataclass(frozen=True)
class ThesisCost:
    """The thesis's GPU: a floor of 185 us, and above it a rate of products, from its two points.

    That rate, 11 TFLOP/s, is 70 % of the V100's peak. Cells other than the LSTM have the same
    floor; the thesis gives no times for them.

    Attributes:
      gathers: whether tasks move rows at the thesis's cost, linear between its points.
    """

    flops: Mapping[str, int]
    gathers: bool

    def task_s(self, cell: str, batch: int) -> float:
        rate = self.flops["lstm"] * _FULL_BATCH / _FULL_S
        seconds = max(_FLOOR_S, self.flops[cell] * batch / rate)
        return seconds + gather_s(batch) if self.gathers else seconds

    def host_s(self, num_tasks: int) -> float:
        """Return 0: the thesis's 250 us include the host's time."""
        return 0.0


def gather_s(batch: int) -> float:
    """Return the seconds that scheduling and gathering add to a task, from the thesis."""
    (small, at_small), (large, at_large) = _GATHER_S.items()
    return at_small + (at_large - at_small) * (batch - small) / (large - small)
