"""The device for which kernels are compiled on machines without it."""

from __future__ import annotations

from jax.experimental import topologies
from jax.sharding import Mesh

# XLA's description of the device for which it compiles, with NVIDIA's figures.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
  clock_rate_ghz: 1.98
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100(num_devices: int = 1) -> Mesh:
    """Return a mesh of H100s of one machine to compile for; no device is needed."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", target_config=_H100, topology=f"1x1x{num_devices}"
    )
    return Mesh(topology.devices, ("tensor",))
