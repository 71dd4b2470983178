"""Step costs on devices that are described by their rooflines, for simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import StepWork
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.planning.schedules import CLUSTERS, DeviceRoofs, TransformerShape
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import StepPlan

A100 = CLUSTERS["A100"].roofs  # 80 GB, SXM


@final
@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder whose query heads have the total width `hidden_size`.

    Attributes:
      bytes_each: bytes of a parameter, and of an element of the KV cache.
      group_size: query heads per KV head.
    """

    num_params: float
    num_layers: int
    hidden_size: int
    bytes_each: int = 2
    group_size: int = 1

    @classmethod
    def of(cls, shape: TransformerShape) -> Self:
        """Return the sizes of a decoder-only model, with its embedding counted once."""
        layer = shape.decode_layer
        return cls(
            num_params=shape.num_params,
            num_layers=shape.num_decode_layers,
            hidden_size=layer.attention_width,
            bytes_each=shape.bytes_each,
            group_size=layer.attention_width // layer.kv_width,
        )

    @property
    def weights_bytes(self) -> float:
        return self.num_params * self.bytes_each

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.num_layers * self.hidden_size * self.bytes_each / self.group_size


@final
@dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """A roofline model of steps: an iteration takes the longer of arithmetic and memory traffic.

    Every iteration reads the weights once, and for every row the KV of all positions that it
    attends to. Each token costs two operations per parameter, and four per layer and channel for
    each position attended to.

    Attributes:
      page_tokens: tokens per page, for swaps.
      num_stages: number of pipeline stages, each one group of shards. All have the same number of
        layers and are busy. The batch has one part per stage, and each part's iteration reads all
        weights once.
      num_shards: number of devices that share every layer (tensor parallelism). Each reads its
        share of the weights and of the KV heads, and takes part in two ring sums per layer.
      efficiency: reached share of the compute and memory roofs; links reach theirs.
      hides_copies: whether swaps overlap the computation layer by layer (Pensieve, sections 3.4.3.2
        and 3.4.3.3), in both directions of the link at the same time; otherwise they precede it,
        sequentially.
      state_bytes: bytes of the state of a sequence, which copies to the host and from it take.
    """

    model: ModelShape
    roofs: DeviceRoofs
    page_tokens: int
    num_stages: int = 1
    num_shards: int = 1
    efficiency: float = 1.0
    hides_copies: bool = False
    state_bytes: float = 0.0

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_shards

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV fits in memory with the weights."""
        memory_bytes = self.num_devices * self.roofs.memory_bytes
        return int((memory_bytes - self.model.weights_bytes) // self.model.kv_bytes_per_token)

    @property
    def page_bytes(self) -> float:
        """Bytes of a page, on all devices together."""
        return self.page_tokens * self.model.kv_bytes_per_token

    def config(
        self,
        *,
        num_pages: float,
        num_host_pages: float,
        max_slots: int,
        max_context: int,
        max_step_tokens: int = 2048,
    ) -> EngineConfig:
        """Return a configuration with this many pages beside the null page."""
        return EngineConfig(
            page_size=self.page_tokens,
            num_pages=1 + int(num_pages),
            num_host_pages=int(num_host_pages),
            max_slots=max_slots,
            max_context=max_context,
            max_step_tokens=max_step_tokens,
            max_decode_iterations=16,
        )

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        """Return the device's seconds of a step.

        Raises:
          InvalidConfigError: a handover, which needs the costs of several groups.
        """
        plan = work.plan
        if plan.handovers:
            raise InvalidConfigError(
                f"a handover of {plan.num_pages_handed_over} pages has no cost, because rooflines "
                "are those of one device group; pass planning.GroupCosts"
            )
        num_tokens = sum(row.num_tokens for row in plan.rows)
        seconds = sum(self._iteration_s(num_tokens, attended) for attended in work.decoded)
        if work.prefilled:  # in the same iteration as the decode rows
            contexts = sum(r.start + r.num_tokens for r in plan.rows if r.num_tokens > 1)
            seconds += self._attention_s(work.prefilled, contexts)
        states_s = self._copy_s(plan.num_states_swapped * self.state_bytes)
        if self.hides_copies:
            busiest = max(len(plan.swaps_out), len(plan.swaps_in))
            return max(seconds, self.swap_s(busiest) + states_s)
        return seconds + self.swap_s(len(plan.swaps_out) + len(plan.swaps_in)) + states_s

    def swap_s(self, num_pages: int) -> float:
        """Return the seconds to copy `num_pages` to the host, or back."""
        return self._copy_s(num_pages * self.page_bytes)

    def _copy_s(self, num_bytes: float) -> float:
        return num_bytes / (self.num_devices * self.roofs.link_bytes_per_s)

    def chunk_cost(self, longest: int) -> RecomputeCost:
        """Return the cost of computing a page in a full step (Pensieve, eq. 3.5 and 3.6).

        Args:
          longest: maximum context length in tokens.
        """

        def seconds(context: int) -> float:
            return self.page_tokens * self._token_s + self._chunk_attention_s(context)

        return RecomputeCost.profiled(seconds, longest)

    def swap_costs(self) -> SwapCosts:
        """Return the swap costs that a device would measure at its start."""
        return SwapCosts(
            page_s=self.swap_s(1),
            token_s=self._token_s,
            position_s=self._chunk_attention_s(1) / self.page_tokens,
        )

    @property
    def _token_s(self) -> float:
        """Seconds per token of a full step, without attention."""
        roof = self.num_devices * self.roofs.flops
        return 2.0 * self.model.num_params / roof / self.efficiency

    def _chunk_attention_s(self, context: int) -> float:
        return self._attention_s(self.page_tokens * context, context)

    def _iteration_s(self, num_tokens: int, attended: int) -> float:
        model, roofs = self.model, self.roofs
        read_s = model.weights_bytes / self.num_shards / roofs.memory_bytes_per_s
        products_s = max(num_tokens * self._token_s, read_s / self.efficiency)
        return products_s + self._sums_s(num_tokens) + self._attention_s(attended, attended)

    def _sums_s(self, num_tokens: int) -> float:
        """Return the seconds of two sums per layer over the shards, per stage."""
        model, num = self.model, self.num_shards
        sent = 2.0 * (num - 1) / num * num_tokens * model.hidden_size * model.bytes_each
        return 2 * model.num_layers * sent / self.num_stages / self.roofs.peer_bytes_per_s

    def _attention_s(self, attended: int, num_read: int) -> float:
        """Return the seconds of attention to `attended` positions, reading KV of `num_read`."""
        model, roofs = self.model, self.roofs
        compute_s = 4.0 * model.num_layers * model.hidden_size * attended / roofs.flops
        read_s = num_read * model.kv_bytes_per_token / roofs.memory_bytes_per_s
        return max(compute_s, read_s) / self.num_devices / self.efficiency
