"""The options of the server, validated before it starts, and its latency classes."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError, InvalidSamplingParamsError
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams, checked_kwargs

LATENCY_HEADER = "x-latency-class"
# The name of each bound in the text of a class.
_BOUND_OF = {name.removesuffix("_bound"): name for name in BOUND_NAMES}


@final
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server; see docs/serving.md.

    Attributes:
      model_name: the name in `/v1/models` and in answers.
      host, port: address to listen on; port 0 takes a free one.
      api_keys: keys of which a client must send one (`Authorization: Bearer KEY`); empty for none.
      allowed_origins: sites whose pages may use this server from a browser, such as
        "https://chat.example.org", or "*" for all; empty for the server's own page alone.
      max_body_bytes: largest body of a request.
      max_prompt_tokens: longest prompt; None for the model's limit.
      max_samples: largest number of samples of a request, over all its prompts.
      max_waiting: number of accepted requests without a token above which further ones get 429.
      max_connections: number of connections above which further ones get 503.
      header_timeout_s: seconds in which the head of a request must arrive.
      body_timeout_s: seconds in which the body of a request must arrive.
      keep_alive_s: seconds that an idle connection stays open.
      request_timeout_s: seconds after which an unfinished answer is cancelled; None for no limit.
      drain_timeout_s: seconds that running requests have after SIGTERM; None for no limit.
      latency_classes: for each class that the header `x-latency-class` can name, its bounds by
        their names in `SamplingParams`.
      adapter_folder: folder below which clients may load and drop adapters; None to forbid both.
      strict_fields: refuse fields of requests that have no effect, rather than ignore them.
      metrics_prefix: first part of the names in `/metrics`, e.g. "vllm" for existing dashboards.
      template_kwargs: variables of the chat template, for chats that do not set them.
      log_requests: write a line of JSON for each request to stdout.
      log_prompts: write bodies of requests to that line too.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_prompt_tokens: int | None = None
    max_samples: int = 128
    max_waiting: int = 1024
    max_connections: int = 4096
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_s: float = 30.0
    request_timeout_s: float | None = 3600.0
    drain_timeout_s: float | None = None
    latency_classes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    adapter_folder: Path | None = None
    strict_fields: bool = False
    metrics_prefix: str = "jaxserve"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_requests: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        try:
            checked_kwargs(self.template_kwargs)
        except InvalidSamplingParamsError as error:
            raise InvalidConfigError(str(error)) from None
        limits = ("max_body_bytes", "max_samples", "max_waiting", "max_connections")
        for name in (*limits, "max_prompt_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InvalidConfigError(f"{name}={limit} is not allowed; pass at least 1")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise InvalidConfigError(
                f"metrics_prefix={self.metrics_prefix!r} is not allowed; pass letters, digits and _"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", origin):
                raise InvalidConfigError(
                    f"allowed_origins has {origin!r}; pass a scheme and a host without a path, "
                    'such as "https://chat.example.org", or "*" for all sites'
                )
        if not 0 <= self.port <= 65535:
            raise InvalidConfigError(
                f"port={self.port} is not allowed; pass 0 to 65535, where 0 takes a free port"
            )
        for name in (
            "header_timeout_s",
            "body_timeout_s",
            "keep_alive_s",
            "request_timeout_s",
            "drain_timeout_s",
        ):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise InvalidConfigError(
                    f"{name}={seconds} is not allowed; pass a finite number above 0"
                )
        for name, bounds in self.latency_classes.items():
            check_bounds(name, bounds)
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise InvalidConfigError("an API key is empty or not printable ASCII; replace it")


def check_names(model_name: str, adapters: Collection[str]) -> None:
    """Raise InvalidConfigError if an adapter has the model's name, which selects the model."""
    if model_name in adapters:
        raise InvalidConfigError(
            f"the adapter {model_name!r} has the name of the served model; load it under another "
            "name, or serve the model under another (--served-model-name)"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """Return the URL of a server on this address, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@final
@dataclass(frozen=True)
class LatencyClass:
    """Bounds of a class, by their names in `SamplingParams`; empty for no class."""

    bounds: Mapping[str, float]

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with these bounds; of two bounds, the tighter one counts."""
        given = params.bounds
        tighter: dict[str, Any] = {
            name: min(s, given.get(name, s)) for name, s in self.bounds.items()
        }
        return replace(params, **tighter)


def parse_latency_classes(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the bounds of classes by name, from texts such as "chat=latency:2,first_token:0.5".

    Raises:
      InvalidConfigError: a text has another form, a bound is not allowed, or a name occurs twice.
    """
    classes: dict[str, dict[str, float]] = {}
    for name, bounds in map(_parsed, texts):
        if name in classes:
            raise InvalidConfigError(f"the latency class {name!r} is given twice; give it once")
        classes[name] = bounds
    return classes


def _parsed(text: str) -> tuple[str, dict[str, float]]:
    name, _, rest = text.partition("=")
    bounds: dict[str, float] = {}
    try:
        for part in rest.split(","):
            kind, seconds = part.split(":")
            if _BOUND_OF[kind] in bounds:
                raise ValueError
            bounds[_BOUND_OF[kind]] = float(seconds)
        if not name or not name.isascii() or not name.isprintable() or name != name.strip():
            raise ValueError
    except (KeyError, ValueError):
        raise InvalidConfigError(
            f"the latency class {text!r} is not allowed; pass a name and seconds, each bound at "
            "most once, e.g. chat=latency:2,first_token:0.5,token:0.05"
        ) from None
    check_bounds(name, bounds)
    return name, bounds


def check_bounds(name: str, bounds: Mapping[str, float]) -> None:
    unknown = sorted(set(bounds) - set(BOUND_NAMES))
    if unknown or not bounds:
        raise InvalidConfigError(
            f"latency class {name!r} has the bounds {sorted(bounds)}; pass one or more of "
            f"{', '.join(BOUND_NAMES)}"
        )
    try:
        SamplingParams(**dict[str, Any](bounds))
    except InvalidSamplingParamsError as error:
        raise InvalidConfigError(f"latency class {name!r}: {error}") from error
