"""The executor of two device groups: one computes prompts, the other one answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.errors import RuntimeClosedError
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.executor import StepHandle
from jaxserve.execution.link import Link, Parcel
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.execution.staged import StagedExecutor
from jaxserve.memory.page_pool import Moves
from jaxserve.scheduling.plan import Handover, StepPlan, StepResult, nothing_computed

_log = logging.getLogger(__name__)
_NAMES = ("encode group", "decode group")

# An executor of one device group, whose page caches a link reads and writes.
LinkedExecutor = DeviceExecutor | StagedExecutor
# The links between two groups, by source and target.
Links = dict[tuple[int, int], Link]


@final
class GroupedExecutor(ModelExecutor):
    """An executor for each of two device groups, and the links between their caches.

    Each group has its own parameters, page cache and slots. The groups run their plans at the same
    time, each in order. A handover copies pages between the caches while both compute. There is no
    host memory: policies with two groups keep no KV of preempted or ended sequences (`Policy`).

    The given executors have pages and slots of the same sizes, and are closed with this one. In
    strict mode any compilation of a copy after the warm-up raises. Handovers are warmed up by
    running them. `config` is that of the decode group; the encode group's has no proposals.
    """

    def __init__(self, groups: Sequence[LinkedExecutor], *, strict: bool = False):
        encode, decode = self._groups = tuple(groups)
        own = decode.config.without_proposals()
        assert encode.config == own, "the groups have pages and slots of other sizes"
        super().__init__(decode.config, strict=strict)
        self.num_device_groups = len(self._groups)
        self.refinement = encode.refinement
        self._num_former = 0  # compilations of executors that were exchanged
        self._links = links_between(encode, decode)
        self._pending: list[HandoverHandle] = []
        self._is_closed = False

    @property
    def groups(self) -> tuple[LinkedExecutor, ...]:
        return self._groups

    @property
    def num_compilations(self) -> int:
        now = sum(group.num_compilations for group in self._groups)
        return self._compilations.count + self._num_former + now

    def submit(self, plan: StepPlan) -> StepHandle:
        if self._is_closed:
            raise RuntimeClosedError("the executor was closed; create a new runtime")
        if plan.handovers:
            return self._hand_over(plan)
        # These pages belong to another sequence now, which may be computed before the copies of
        # their former owner arrive.
        taken = {page for _, _, page in plan.page_updates}
        for handle in self._pending:
            handle.drop(taken, plan.group)
        return self._groups[plan.group].submit(plan)

    def _hand_over(self, plan: StepPlan) -> HandoverHandle:
        with self._compilations.watch(plan):
            parcels = {
                (source, target): self._links[source, target].send(pages)
                for (source, target), pages in _pages_by_link(plan.handovers).items()
            }
        handle = HandoverHandle(plan, parcels, self._receive)
        self._pending.append(handle)
        return handle

    def _receive(self, handle: HandoverHandle, *, is_lost: bool = False) -> None:
        self._pending.remove(handle)
        if is_lost:
            return
        with self._compilations.watch(handle.plan):
            for way, parcels in handle.parcels.items():
                for parcel in parcels:
                    self._links[way].receive(parcel)

    def exchange(self, groups: Sequence[LinkedExecutor], links: Links) -> None:
        """Replace the executors of both groups and their links, and close the previous executors.

        The caller has collected every step, and no sequence has pages.
        """
        assert not self._pending, "pages are on their way"
        former, self._groups, self._links = self._groups, tuple(groups), links
        encode, decode = self._groups
        self.config, self.refinement = decode.config, encode.refinement
        self._warm_num_pages = {self.config.num_pages} if self._compilations.is_warm else set()
        for group in former:
            self._num_former += group.num_compilations
            group.close()

    def fitted(self, params: Any, *, partial: bool = False) -> list[Any]:
        """Return one entry per group."""
        return [group.fitted(params, partial=partial) for group in self._groups]

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return self._groups[0].encode(prompts)

    @property
    def params(self) -> list[Any]:
        return [group.params for group in self._groups]

    def update_params(self, params: list[Any]) -> None:
        for group, own in zip(self._groups, params, strict=True):
            group.update_params(own)

    def drop_params(self) -> None:
        for group in self._groups:
            group.drop_params()

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        steps = [
            (f"{name}, {step}", function)
            for name, group in zip(_NAMES, self._groups, strict=True)
            for step, function in group.warmup_steps()
        ]
        return [*steps, *(("handover", link.warm_up) for link in self._links.values())]

    def finish_warmup(self) -> None:
        for group in self._groups:
            group.finish_warmup()
        super().finish_warmup()

    @property
    def is_warm(self) -> bool:
        return super().is_warm and all(group.is_warm for group in self._groups)

    def resize(self, num_pages: int, moves: Moves) -> None:
        old_num_pages = self.config.num_pages
        done: list[LinkedExecutor] = []
        try:
            for group in self._groups:
                group.resize(num_pages, moves)
                done.append(group)
        except Exception:
            for group in done:
                group.resize(old_num_pages, [(new, old) for old, new in moves])
            raise
        self.config = self._groups[1].config
        self._compilations.expect_none(num_pages in self._warm_num_pages)

    @property
    def num_buffers(self) -> int:
        """The minimum over the groups."""
        return min(group.num_buffers for group in self._groups)

    @property
    def device(self) -> Any:
        """A device of the group whose pages are the largest."""
        return max(self._groups, key=_page_bytes).device

    def reset(self) -> bool:
        """Reset both groups; pages in transit between them are lost."""
        self._pending.clear()
        return all([group.reset() for group in self._groups])

    def close(self) -> None:
        if not self._is_closed:
            self._compilations.close()
        self._is_closed = True
        self._pending.clear()
        for group in self._groups:
            group.close()


@final
class HandoverHandle:
    """Pages in transit from one group to the other.

    `collect` writes them to the target's cache once they have arrived, so that the target's steps
    do not wait for them. If the source's devices or the transfer have failed, it leaves the
    target's cache unchanged and reports the loss: it calls `receive` once, with whether they are
    lost.
    """

    def __init__(
        self,
        plan: StepPlan,
        parcels: Mapping[tuple[int, int], Sequence[Parcel]],
        receive: Callable[..., None],
    ):
        self.plan = plan
        self.parcels = parcels
        self._receive = receive

    def drop(self, pages: set[int], target: int) -> None:
        for (_, arrives_in), parcels in self.parcels.items():
            if arrives_in == target:
                for parcel in parcels:
                    parcel.drop(pages)

    def is_ready(self) -> bool:
        return all(parcel.is_ready() for parcels in self.parcels.values() for parcel in parcels)

    def collect(self) -> StepResult:
        try:
            jax.block_until_ready([p.pieces for parcels in self.parcels.values() for p in parcels])
        except jax.errors.JaxRuntimeError as error:
            num_lost = len(self.plan.handovers)
            _log.warning("the KV of %d sequences was lost: %s", num_lost, error)
            self._receive(self, is_lost=True)
            return nothing_computed(np.zeros(num_lost, np.bool_))
        self._receive(self)
        return nothing_computed()


def links_between(encode: LinkedExecutor, decode: LinkedExecutor) -> Links:
    """Return the links between the caches of two groups, by source and target."""
    return {
        (0, 1): Link(encode.page_pools, decode.page_pools),
        (1, 0): Link(decode.page_pools, encode.page_pools),
    }


def _pages_by_link(handovers: Sequence[Handover]) -> dict[tuple[int, int], list[int]]:
    """Return the pages to copy by source and target; pages that sequences share count once."""
    found: dict[tuple[int, int], dict[int, None]] = {}
    for each in handovers:
        found.setdefault((each.source, each.target), {}).update(dict.fromkeys(each.pages))
    return {way: list(pages) for way, pages in found.items()}


def _page_bytes(group: LinkedExecutor) -> int:
    """Return the bytes of a group's largest cache on one device."""
    return max(pool.shard_bytes for pool in group.page_pools)
