"""A server as a process of its own, on a tiny model whose steps take 10 ms.

The argument, if there is one, is the journal of its conversations, or "late" for a service that
takes a minute to close, and whose steps take 100 ms.
"""

from __future__ import annotations

import sys
import time
from typing import Any, final

from jaxserve.server import ServerOptions, listen, serve
from tests.server.serving import NAME, runtime


@final
class _Late:
    """A runtime that still computes something when it is closed, which nothing interrupts."""

    def __init__(self, rt: Any):
        self._rt = rt

    def close(self) -> None:
        time.sleep(60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rt, name)


def main() -> None:
    options = ServerOptions(model_name=NAME, port=0, log_requests=False)
    listener = listen(options)
    print(
        f"listening on http://127.0.0.1:{listener.getsockname()[1]};", file=sys.stderr, flush=True
    )
    argument = sys.argv[1] if len(sys.argv) > 1 else None
    journal = None if argument == "late" else argument
    step_s = 0.1 if argument == "late" else 0.01
    with runtime(step_s=step_s, max_decode_iterations=1, conversations=journal) as rt:
        service: Any = _Late(rt) if argument == "late" else rt
        is_closed = serve(
            options,
            lambda: (service, rt.outlook),
            listener=listener,
            on_drain=lambda num: print(f"{num} go on", file=sys.stderr, flush=True),
        )
        # `jaxserve serve` ends the process here, but a thread that sleeps does not keep this one.
        assert is_closed == (argument != "late")


if __name__ == "__main__":
    main()
