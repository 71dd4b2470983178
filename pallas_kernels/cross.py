"""Tracing and lowering for a GPU that is not there, to test what would be compiled for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import AbstractDevice, AbstractMesh

H100 = "NVIDIA H100 80GB HBM3"
H100_CORES = 132


@contextmanager
def targeting(device: str = H100) -> Iterator[None]:
    """What is traced in the block is for this GPU; lower it with `lowering_platforms=("cuda",)`."""
    kind = AbstractDevice(device_kind=device, num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        yield
