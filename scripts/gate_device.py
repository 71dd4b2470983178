"""The GPUs for which kernels are compiled on machines without them, and their assembler."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.kernels.gpu import GPUS

# XLA's description of the device for which it compiles.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_bytes}
  shared_memory_per_core: {core_shared_bytes}
  l2_cache_size: {cache_bytes}
  memory_bandwidth: {bytes_per_s}
  device_memory_size: {memory_bytes}
  clock_rate_ghz: {clock_ghz}
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""


@final
@dataclass(frozen=True, kw_only=True)
class _Figures:
    """NVIDIA's figures of a GPU that XLA knows in addition to those of `Gpu`.

    Attributes:
      fpus, threads: float32 units, and maximum threads, of a multiprocessor.
      core_shared_bytes: shared memory of a multiprocessor.
    """

    fpus: int = 128
    threads: int = 2048
    core_shared_bytes: int = 228 << 10
    cache_bytes: int = 50 << 20
    bytes_per_s: int
    memory_bytes: int
    clock_ghz: float


_SMALL = dict(threads=1536, core_shared_bytes=100 << 10, cache_bytes=96 << 20)
_FIGURES: Mapping[str, _Figures] = MappingProxyType(
    {
        "h100": _Figures(bytes_per_s=3352320000000, memory_bytes=84929347584, clock_ghz=1.98),
        "a100": _Figures(
            fpus=64,
            core_shared_bytes=164 << 10,
            cache_bytes=40 << 20,
            bytes_per_s=2039040000000,
            memory_bytes=85100068864,
            clock_ghz=1.41,
        ),
        "l40s": _Figures(
            **_SMALL, bytes_per_s=864000000000, memory_bytes=51539607552, clock_ghz=2.52
        ),
        "h200": _Figures(bytes_per_s=4800000000000, memory_bytes=151397597184, clock_ghz=1.98),
        "b200": _Figures(
            cache_bytes=132644864,
            bytes_per_s=7672320000000,
            memory_bytes=191514411008,
            clock_ghz=1.965,
        ),
        "rtx5090": _Figures(
            **_SMALL, bytes_per_s=1792000000000, memory_bytes=34359738368, clock_ghz=2.407
        ),
    }
)


def mesh_of(name: str = "h100", num_devices: int = 1) -> Mesh:
    """Return a mesh of GPUs of one machine to compile for, by a name in `GPUS`; none is needed."""
    gpu = GPUS[name]
    major, minor = gpu.capability
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=name,
        target_config=_TARGET.format(
            **vars(_FIGURES[name]),
            kind=gpu.kind,
            major=major,
            minor=minor,
            cores=gpu.num_cores,
            shared_bytes=gpu.shared_bytes,
        ),
        topology=f"1x1x{num_devices}",
    )
    return Mesh(topology.devices, ("tensor",))


def spills(report: str) -> dict[str, int]:
    """Return the bytes that a thread of each kernel spills, from what `ptxas -v` reports."""
    found = re.findall(r"properties for (\w+)\n.* (\d+) bytes spill stores", report)
    return {kernel: int(size) for kernel, size in found if int(size)}


def ptxas() -> str:
    """Return the assembler of the gate's environment, or of the machine."""
    own = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/ptxas"))
    found = str(own[0]) if own else shutil.which("ptxas")
    assert found is not None, "XLA has found an assembler"
    return found
