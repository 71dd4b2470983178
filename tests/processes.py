"""Child processes of tests."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """For `preexec_fn`: Ctrl-C works even where the tests run as a shell's background job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
