"""A server as a process of its own, on a tiny model whose steps take 10 ms.

The argument, if there is one, is the journal of its conversations.
"""

from __future__ import annotations

import sys

from jaxserve.server import ServerOptions, listen, serve
from tests.server.serving import NAME, runtime


def main() -> None:
    options = ServerOptions(model_name=NAME, port=0, log_requests=False)
    listener = listen(options)
    print(
        f"listening on http://127.0.0.1:{listener.getsockname()[1]};", file=sys.stderr, flush=True
    )
    journal = sys.argv[1] if len(sys.argv) > 1 else None
    with runtime(step_s=0.01, max_decode_iterations=1, conversations=journal) as rt:
        serve(options, lambda: (rt, rt.outlook), listener=listener)


if __name__ == "__main__":
    main()
