"""Files and folders of code that only this user may have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_own(about: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and only this user can write to it."""
    others = stat.S_IWGRP | stat.S_IWOTH
    return about.st_uid == os.getuid() and not about.st_mode & others


def read_own_file(path: Path) -> bytes:
    """Return the contents of a file that only this user can write to.

    Raises:
      FileNotFoundError: there is no such file.
      PermissionError: it is someone else's, others can write to it, or it is a link.
      OSError: it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or not is_own(about):
            raise PermissionError(
                f"{path} is not a file that this user alone can write to, and it holds code"
            )
        return file.read()
