"""The disk tiers of a runtime's replicas, as its options ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxserve.core.assets import cache_folder
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.memory.disk_tier import DiskTier
from jaxserve.memory.page_files import PageFiles
from jaxserve.scheduling.policy import Policy


def check_disk(options: RuntimeOptions, policy: Policy) -> None:
    """Refuse a disk that would never be written to, or cannot be.

    Raises:
      InvalidConfigError: the policy keeps no pages on the host, or is not given any; or the folder
        cannot be used.
    """
    if options.disk_memory is None:
        return
    if not policy.retention.uses_host:
        raise InvalidConfigError(
            f"disk_memory={options.disk_memory!r}, but policy={policy.name!r} keeps no pages on "
            'the host, from where they go to the disk; give policy="pensieve" or "auto", or no '
            "disk_memory"
        )
    if options.host_memory == 0:
        raise _no_host_pages(options)
    PageFiles(_folder(options) / "0", parse_bytes(options.disk_memory)).close()


def disks_of(options: RuntimeOptions, configs: Sequence[EngineConfig]) -> list[DiskTier]:
    """One for each replica, in folders of their own; none where no `disk_memory` is given.

    Args:
      configs: of the replicas' executors.

    Raises:
      InvalidConfigError: the executors keep no pages on the host, or the folder cannot be used, by
        this runtime or because another does.
    """
    if options.disk_memory is None:
        return []
    if not all(config.num_host_pages for config in configs):
        raise _no_host_pages(options)
    max_bytes = parse_bytes(options.disk_memory) // len(configs)
    with ExitStack() as if_one_fails:
        disks = []
        for index in range(len(configs)):
            disks.append(DiskTier(_folder(options) / str(index), max_bytes))
            if_one_fails.callback(disks[-1].close)
        if_one_fails.pop_all()
    return disks


def _folder(options: RuntimeOptions) -> Path:
    return Path(options.disk_folder or cache_folder() / "pages").expanduser()


def _no_host_pages(options: RuntimeOptions) -> InvalidConfigError:
    return InvalidConfigError(
        f"disk_memory={options.disk_memory!r}, but there are no pages on the host, from where they "
        "go to the disk; give more host_memory, or no disk_memory. Models that are cut into stages "
        "or served by several processes keep none there"
    )
