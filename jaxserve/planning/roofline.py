"""What steps would take on a device that is only described: its rooflines, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.engine.step_cost import StepWork
from jaxserve.scheduling.plan import StepPlan


@final
@dataclass(frozen=True, kw_only=True)
class DeviceRoofs:
    """Limits of one device.

    Attributes:
      flops: arithmetic a second, in the model's precision.
      memory_bytes_per_s: of device memory.
      link_bytes_per_s: between the device and the host.
      memory_bytes: of the device.
    """

    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: float


@final
@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with plain multi-head attention.

    Attributes:
      bytes_each: of a parameter, and of an element of the KV cache.
    """

    num_params: float
    num_layers: int
    hidden_size: int
    bytes_each: int = 2

    @property
    def weights_bytes(self) -> float:
        return self.num_params * self.bytes_each

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.num_layers * self.hidden_size * self.bytes_each


@final
@dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """Step costs: an iteration takes the longer of its arithmetic and its memory traffic.

    Every iteration reads the weights once and the KV of all that its rows attend to. Each token
    costs two operations a parameter, and four a layer and channel for each position attended to.

    Attributes:
      page_tokens: of a page that is swapped.
      num_stages: devices in a pipeline, each with as many layers and all of them busy. The batch
        then is in as many parts, and a part's iteration reads all weights: in the time in which
        every part has passed every stage, each stage has read its weights once a part.
      efficiency: share of the roofs that is reached.
    """

    model: ModelShape
    roofs: DeviceRoofs
    page_tokens: int
    num_stages: int = 1
    efficiency: float = 1.0

    @property
    def kv_tokens(self) -> int:
        """That fit beside the weights."""
        memory_bytes = self.num_stages * self.roofs.memory_bytes
        return int((memory_bytes - self.model.weights_bytes) // self.model.kv_bytes_per_token)

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        num_tokens = sum(row.num_tokens for row in work.plan.rows)
        seconds = sum(self._iteration_s(num_tokens, attended) for attended in work.decoded)
        if work.prefilled:  # beside the decoded rows of the same iteration
            seconds += self._attention_s(work.prefilled, is_read_once=True)
        return seconds + self.swap_s(len(work.plan.swaps_out) + len(work.plan.swaps_in))

    def swap_s(self, num_pages: int) -> float:
        """Seconds to copy so many pages to the host, or back."""
        page_bytes = self.page_tokens * self.model.kv_bytes_per_token
        return num_pages * page_bytes / (self.num_stages * self.roofs.link_bytes_per_s)

    def _iteration_s(self, num_tokens: int, attended: int) -> float:
        """The products with weights, and attention after them."""
        model, roofs = self.model, self.roofs
        compute_s = 2.0 * model.num_params * num_tokens / (self.num_stages * roofs.flops)
        read_s = model.weights_bytes / roofs.memory_bytes_per_s
        products_s = max(compute_s, read_s) / self.efficiency
        return products_s + self._attention_s(attended, is_read_once=False)

    def _attention_s(self, attended: int, *, is_read_once: bool) -> float:
        """Of rows that attend to so many positions in all.

        `is_read_once`: for all tokens of a prompt together, so that arithmetic is what counts.
        """
        model, roofs = self.model, self.roofs
        compute_s = 4.0 * model.num_layers * model.hidden_size * attended / roofs.flops
        read_s = 0.0 if is_read_once else attended * model.kv_bytes_per_token
        together_s = max(compute_s, read_s / roofs.memory_bytes_per_s)
        return together_s / self.num_stages / self.efficiency
