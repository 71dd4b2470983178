"""Clusters of devices: those of ExeGPT's table 2, and newer ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.roofline import DeviceRoofs


@final
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal machines, and the shares of their limits that programs reach.

    Attributes:
      network_bytes_per_s: bandwidth between devices of different machines, in one direction.
      compute_efficiency, memory_efficiency, peer_efficiency: reached share of `flops`, of the
        memory bandwidth, and of the bandwidths between devices and to the host.
      sync_latency_s: fixed seconds of a sum over shards.
      handoff_latency_s: fixed seconds of a transfer between stages.
      launch_s: fixed seconds of a pass in a stage.
      memory_share: share of device memory for weights, KV and activations.
      measured_degrees: tensor-parallel degrees whose costs are known; None for all.
    """

    roofs: DeviceRoofs
    num_devices: int
    devices_per_machine: int
    network_bytes_per_s: float
    compute_efficiency: float
    memory_efficiency: float
    peer_efficiency: float
    sync_latency_s: float
    handoff_latency_s: float
    launch_s: float
    memory_share: float = 0.9
    measured_degrees: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.num_devices, self.devices_per_machine) < 1:
            raise InvalidConfigError(
                f"num_devices={self.num_devices} in machines of {self.devices_per_machine} is not "
                "allowed; pass at least 1 of each"
            )

    @property
    def memory_bytes(self) -> float:
        return self.memory_share * self.roofs.memory_bytes

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees: powers of two that divide a machine's devices and the cluster.

        Shards of a layer share a machine. With measured degrees, it is those that fit in a machine;
        remaining devices are single stages.
        """
        inside = min(self.num_devices, self.devices_per_machine)
        if self.measured_degrees is not None:
            return tuple(degree for degree in self.measured_degrees if degree <= inside)
        return tuple(
            degree
            for degree in (1, 2, 4, 8, 16)
            if inside % degree == 0 and self.num_devices % degree == 0
        )

    def of(self, num_devices: int) -> Cluster:
        """Return the sub-cluster of `num_devices` devices, in as few machines as possible."""
        return replace(self, num_devices=num_devices)


# Compute, memory and PCIe efficiency were fitted to tables 6 and 7 of the paper (OPT 13B on four
# A40; docs/benchmarks/papers.md shows the fit). The same values are used for other devices.
_FITTED: dict[str, Any] = {
    "compute_efficiency": 0.70,
    "memory_efficiency": 0.80,
    "peer_efficiency": 0.65,
    "sync_latency_s": 20e-6,
    "handoff_latency_s": 50e-6,
    "launch_s": 1e-3,
}
# NVLink reaches a larger share of its bandwidth with less latency; neither was measured.
_NVLINK: dict[str, Any] = _FITTED | {"peer_efficiency": 0.75, "sync_latency_s": 10e-6}

# Data sheets: dense 16-bit tensor operations; one direction of each link. Table 2 of the paper for
# the numbers of devices and the networks of A40 and A100.
CLUSTERS = {
    "A40": Cluster(
        roofs=DeviceRoofs(
            flops=149.7e12,
            memory_bytes_per_s=696e9,
            link_bytes_per_s=31.5e9,
            memory_bytes=48e9,
            peer_bytes_per_s=31.5e9,
        ),
        num_devices=48,
        devices_per_machine=8,
        network_bytes_per_s=12.5e9,
        **_FITTED,
    ),
    "A100": Cluster(
        roofs=DeviceRoofs(
            flops=312e12,
            memory_bytes_per_s=2039e9,
            link_bytes_per_s=31.5e9,
            memory_bytes=80e9,
            peer_bytes_per_s=300e9,
        ),
        num_devices=16,
        devices_per_machine=8,
        network_bytes_per_s=25e9,
        **_NVLINK,
    ),
    "H100": Cluster(
        roofs=DeviceRoofs(
            flops=989.4e12,
            memory_bytes_per_s=3350e9,
            link_bytes_per_s=63e9,
            memory_bytes=80e9,
            peer_bytes_per_s=450e9,
        ),
        num_devices=16,
        devices_per_machine=8,
        network_bytes_per_s=50e9,
        **_NVLINK,
    ),
    "H200": Cluster(
        roofs=DeviceRoofs(
            flops=989.4e12,
            memory_bytes_per_s=4800e9,
            link_bytes_per_s=63e9,
            memory_bytes=141e9,
            peer_bytes_per_s=450e9,
        ),
        num_devices=16,
        devices_per_machine=8,
        network_bytes_per_s=50e9,
        **_NVLINK,
    ),
}

# Table 2: (model, cluster, devices).
DEPLOYMENTS = (
    ("GPT3-101B", "A100", 16),
    ("GPT3-175B", "A100", 16),
    ("T5-11B", "A40", 8),
    ("OPT-13B", "A40", 4),
    ("GPT3-39B", "A40", 16),
    ("GPT3-175B", "A40", 32),
    ("GPT3-341B", "A40", 48),
)
