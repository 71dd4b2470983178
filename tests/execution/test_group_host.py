"""Host pages of several processes: all of them start with the memory, or none does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jaxserve.core.errors import HostMemoryError, InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.compatibility import Setting, check_together
from jaxserve.execution.pages import DevicePages
from jaxserve.execution.processes import allocate_host
from jaxserve.models.batch import KVCache
from jaxserve.runtime.build import check_disk
from jaxserve.scheduling.presets import get_policy
from jaxserve.testing.tiny import OPTIONS
from tests.common.process_groups import connected


def _pages(num_host_pages: int) -> DevicePages:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    buffers = (jax.device_put(jnp.zeros((1, 4, 2, 4, 8)), place),)
    return DevicePages(KVCache(buffers, buffers), place, num_host_pages)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_process_without_the_memory_ends_the_start_of_all(lacking):
    """The request is for more memory than any machine can address; nothing waits."""
    num_host_pages = [10**13 if i == lacking else 4 for i in range(2)]
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(allocate_host, _pages(num), group)
            for num, group in zip(num_host_pages, connected(), strict=True)
        ]
        for each in started:
            with pytest.raises(HostMemoryError, match=f"process {lacking} of 2: the host has no"):
                each.result(30)


def test_a_disk_is_refused(tmp_path):
    """A process can read its own part of a page only."""
    given = dict(policy="pensieve", disk_memory="1MB", disk_folder=tmp_path)
    options = RuntimeOptions.parse(OPTIONS | given)
    with pytest.raises(InvalidConfigError, match="several processes serve the model"):
        check_together(Setting(options=options, num_processes=2))
    check_together(Setting(options=options))
    check_disk(options, get_policy("pensieve"))
