"""The disk tiers of a runtime's executors, each in its own folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxserve.core.assets import cache_folder
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.execution.protocol import ModelExecutor
from jaxserve.memory.disk_tier import DiskTier
from jaxserve.memory.page_files import PageFiles
from jaxserve.scheduling.policy import Policy


def open_disks(options: RuntimeOptions, executors: Sequence[ModelExecutor]) -> list[DiskTier]:
    """Open a disk tier for each executor, in its own folder; return [] without `disk_memory`.

    Raises:
      InvalidConfigError: an executor has no host pages, the folder cannot be used, or another
        runtime uses it.
    """
    if options.disk_memory is None:
        return []
    if any(executor.host_memory is None for executor in executors):
        raise _no_host_pages(options)
    max_bytes = parse_bytes(options.disk_memory) // len(executors)
    with ExitStack() as if_one_fails:
        disks = []
        for index in range(len(executors)):
            disks.append(DiskTier(PageFiles(_disk_folder(options) / str(index), max_bytes)))
            if_one_fails.callback(disks[-1].close)
        if_one_fails.pop_all()
    return disks


def check_disk(options: RuntimeOptions, policy: Policy, *, has_processes: bool) -> None:
    """Check that pages can reach the disk tier and that its folder can be used.

    Args:
      has_processes: whether several processes serve the model.

    Raises:
      InvalidConfigError: the policy retains no pages on the host, several processes serve the
        model, or the folder cannot be used.
    """
    if options.disk_memory is None:
        return
    if has_processes:
        raise InvalidConfigError(
            f"disk_memory={options.disk_memory!r}, but several processes serve the model, and each "
            "has only a part of every page; pass no disk_memory, or a mesh of one process's devices"
        )
    if not policy.retention.uses_host:
        raise InvalidConfigError(
            f"disk_memory={options.disk_memory!r}, but policy={policy.name!r} keeps no pages on "
            'the host, from which the disk gets them; pass policy="pensieve" or "auto", or no '
            "disk_memory"
        )
    if options.host_memory == 0:
        raise _no_host_pages(options)
    PageFiles(_disk_folder(options) / "0", parse_bytes(options.disk_memory)).close()


def _disk_folder(options: RuntimeOptions) -> Path:
    return Path(options.disk_folder or cache_folder() / "pages").expanduser()


def _no_host_pages(options: RuntimeOptions) -> InvalidConfigError:
    return InvalidConfigError(
        f"disk_memory={options.disk_memory!r}, but there are no host pages, from which the disk "
        "gets its pages; pass more host_memory, or no disk_memory"
    )
