"""What section 3.6 of the Pensieve thesis evaluates: models, GPUs, policies, and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.common.policies import VARIANTS
from jaxserve.core.config import EngineConfig
from jaxserve.planning import DeviceRoofs, ModelShape, RooflineCost
from jaxserve.scheduling.presets import PRESETS

# Section 3.6.1.
MAX_CONTEXT = 16384
PAGE_TOKENS = 32
REACTION_S = 60.0
KV_BYTES = 40e9  # of each GPU
HOST_BYTES = 220e9  # for each GPU
# NVIDIA A100 80 GB (SXM): data sheet; one direction of NVLink and of PCIe 4.0 x16.
A100 = DeviceRoofs(
    flops=312e12,
    memory_bytes_per_s=2.039e12,
    link_bytes_per_s=31.5e9,
    memory_bytes=80e9,
    peer_bytes_per_s=300e9,
)


@final
@dataclass(frozen=True)
class Machine:
    """A model of table 3.1, the GPUs that share each of its layers, and the lowest rate played."""

    model: ModelShape
    num_gpus: int
    requests_per_s: float

    def cost(self, *, efficiency: float, hides_copies: bool) -> RooflineCost:
        """Return the costs of its steps."""
        return RooflineCost(
            model=self.model,
            roofs=A100,
            page_tokens=PAGE_TOKENS,
            num_shards=self.num_gpus,
            efficiency=efficiency,
            hides_copies=hides_copies,
        )

    def config(self, cost: RooflineCost) -> EngineConfig:
        """Return a runtime's configuration with the thesis's memory; pages return on admission."""
        return EngineConfig(
            page_size=PAGE_TOKENS,
            num_pages=1 + int(self.num_gpus * KV_BYTES // cost.page_bytes),
            num_host_pages=int(self.num_gpus * HOST_BYTES // cost.page_bytes),
            max_slots=256,
            max_context=MAX_CONTEXT,
            max_step_tokens=2048,
            max_decode_iterations=16,
        )


# Llama 2-13B has 10 heads of keys and values here instead of 40, and 1.6e9 parameters fewer.
MACHINES = {
    "OPT-13B": Machine(ModelShape(num_params=12.85e9, num_layers=40, hidden_size=5120), 1, 0.4),
    "Llama 2-13B": Machine(
        ModelShape(num_params=11.44e9, num_layers=40, hidden_size=5120, group_size=4), 1, 3.0
    ),
    "OPT-66B": Machine(ModelShape(num_params=65.7e9, num_layers=64, hidden_size=9216), 4, 0.6),
    "Llama 2-70B": Machine(
        ModelShape(num_params=68.98e9, num_layers=80, hidden_size=8192, group_size=8), 4, 1.5
    ),
}
STATELESS = "vllm_like"
TWO = (STATELESS, "pensieve")
THREE = (STATELESS, "pensieve_device_only", "pensieve")
ALL = (STATELESS, "s3_oracle", *THREE[1:], "auto")
KNOWN = {
    **{name: PRESETS[name] for name in ALL},
    "pensieve_lru": VARIANTS["pensieve_lru"],
}


@final
@dataclass(frozen=True)
class Panel:
    """One plot of the thesis.

    Attributes:
      gain: the throughput over stateless serving that the thesis states; None where it does not.
      bounds: the latency at which the curves end, over the latency bound.
    """

    figure: str
    model: str
    policies: Sequence[str]
    gain: float | None
    min_rounds: int = 1
    reaction_s: float = REACTION_S
    bounds: float = 1.0


PANELS = (
    Panel("3.12", "OPT-13B", ALL, 1.25),
    Panel("3.12", "Llama 2-13B", ALL, 1.52),
    Panel("3.13", "OPT-66B", ALL, 1.5),
    Panel("3.13", "Llama 2-70B", ALL, 1.6),
    Panel("3.14", "OPT-13B", ("pensieve_lru", "pensieve"), None, bounds=10.0),
    Panel("3.15", "OPT-13B", THREE, 1.3, min_rounds=5),
    Panel("3.15", "Llama 2-13B", THREE, 1.7, min_rounds=5),
    Panel("3.16", "Llama 2-13B", TWO, None, reaction_s=30.0),
    Panel("3.16", "Llama 2-13B", TWO, 1.4, reaction_s=120.0),
)
