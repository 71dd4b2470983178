"""The HTTP server: OpenAI's API over a `Service`, of which `Runtime` and `Fleet` are two.

It needs the extra `serve`. `jaxserve serve` starts it; `running` serves in a thread:

    from jaxserve.server import ServerOptions, running

    with Runtime.from_pretrained("smollm2-135m") as rt:
        with running(rt, ServerOptions(model_name="smollm2-135m")) as url:
            ...
"""

from jaxserve.server.options import (
    ServerOptions,
    check_names,
    is_loopback,
    parse_latency_classes,
    url_of,
)
from jaxserve.server.run import listen, running, serve

__all__ = [
    "ServerOptions",
    "check_names",
    "is_loopback",
    "listen",
    "parse_latency_classes",
    "running",
    "serve",
    "url_of",
]
