"""Tracing and lowering for a GPU on a machine without one, for tests of the compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.kernels.gpu import GPUS, Gpu


@contextmanager
def targeting(gpu: Gpu = GPUS["h100"]) -> Iterator[None]:
    """Trace for this GPU inside the block; lower with `lowering_platforms=("cuda",)`."""
    kind = AbstractDevice(device_kind=gpu.kind, num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        yield
