"""The executor of two device groups: one computes prompts, the other one answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from jaxserve.execution.executor import StepHandle
from jaxserve.execution.model_executor import ModelExecutor, resize_all
from jaxserve.execution.stages import StepExecutor
from jaxserve.execution.transport import Arrived, LocalTransport
from jaxserve.memory.page_pool import Moves
from jaxserve.scheduling.plan import StepPlan

_NAMES = ("encode group", "decode group")


@final
class GroupedExecutor(ModelExecutor):
    """An executor for each of two device groups, and the transport between their caches.

    Each group has its own parameters, page cache and slots. The groups run their plans at the same
    time, each in order. A handover copies pages between the caches while both compute. There is no
    host memory: policies with two groups keep no KV of preempted or ended sequences (`Policy`).

    The given executors have pages and slots of the same sizes, and are closed with this one. In
    strict mode any compilation of a copy after the warm-up raises. Handovers are warmed up by
    running them. `config` is that of the decode group; the encode group's has no proposals.
    """

    def __init__(self, groups: Sequence[StepExecutor], *, strict: bool = False):
        encode, decode = self._groups = tuple(groups)
        own = decode.config.without_proposals()
        assert encode.config == own, "the groups have pages and slots of other sizes"
        super().__init__(decode.config, strict=strict)
        self.num_device_groups = len(self._groups)
        self.refinement = encode.refinement
        self._num_former = 0  # compilations of executors that were exchanged
        self._transport = LocalTransport(encode.page_pools, decode.page_pools)

    @property
    def groups(self) -> tuple[StepExecutor, ...]:
        return self._groups

    @property
    def num_compilations(self) -> int:
        now = sum(group.num_compilations for group in self._groups)
        return self._compilations.count + self._num_former + now

    def submit(self, plan: StepPlan) -> StepHandle:
        self._raise_if_closed()
        if plan.handovers:
            with self._compilations.watch(plan):
                sent = self._transport.send(plan, plan.index)
            return self._transport.track(plan, plan.index, sent, self._receive)
        self._transport.keep_off(plan)
        return self._groups[plan.group].submit(plan)

    def _receive(self, plan: StepPlan, arrived: Arrived) -> None:
        with self._compilations.watch(plan):
            self._transport.write(arrived)

    def exchange(self, groups: Sequence[StepExecutor], transport: LocalTransport) -> None:
        """Replace the executors of both groups and the transport between them; close the former.

        The caller has collected every step, and no sequence has pages.
        """
        assert self._transport.is_idle, "pages are on their way"
        former, self._groups, self._transport = self._groups, tuple(groups), transport
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
        return [*steps, ("handover", self._transport.warm_up)]

    def finish_warmup(self) -> None:
        for group in self._groups:
            group.finish_warmup()
        super().finish_warmup()

    @property
    def is_warm(self) -> bool:
        return super().is_warm and all(group.is_warm for group in self._groups)

    def resize(self, num_pages: int, moves: Moves) -> None:
        resize_all(self._groups, self.config.num_pages, num_pages, moves)
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
        self._transport.drop_pending()
        return all([group.reset() for group in self._groups])

    def close(self) -> None:
        if not self._is_closed:
            self._compilations.close()
        self._is_closed = True
        self._transport.drop_pending()
        for group in self._groups:
            group.close()


def _page_bytes(group: StepExecutor) -> int:
    """Return the bytes of a group's largest cache on one device."""
    return max(pool.shard_bytes for pool in group.page_pools)
