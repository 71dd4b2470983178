"""`jaxserve serve`, which answers OpenAI's API over HTTP."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.options import ProcessOptions, ServiceOptions, flat
from jaxserve.core.errors import InvalidConfigError, MissingExtraError

_SERVER = "Server"
_KEY_VARIABLE = "JAXSERVE_API_KEY"
# Number of adapters that clients may load, if the command gives none.
_MORE_ADAPTERS = 4


def _server(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=_SERVER)


@flat()
def serve(
    *,
    model: Annotated[
        str, typer.Argument(help="A name (see `jaxserve models list`), folder or GGUF file.")
    ] = opt.DEFAULT_MODEL,
    host: Annotated[str, _server("--host", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _server("--port", "Port to listen on; 0 takes a free one.")] = 8000,
    served_name: Annotated[
        str | None,
        _server("--served-model-name", "The model's name for clients; by default MODEL."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _server(
            "--api-key-file",
            f"File of API keys, one a line. ${_KEY_VARIABLE} is another key.",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        _server(
            "--allowed-origin",
            "Site whose pages may use the server, e.g. https://chat.example.org, or *; may be "
            "repeated.",
        ),
    ] = None,
    max_body: Annotated[
        str, _server("--max-body", "Largest body of a request, e.g. 16MiB.")
    ] = "16MiB",
    max_prompt_tokens: Annotated[
        int | None, _server("--max-prompt-tokens", "Longest prompt.")
    ] = None,
    max_samples: Annotated[
        int, _server("--max-samples", "Most samples of a request, over its prompts.")
    ] = 128,
    max_waiting: Annotated[
        int, _server("--max-waiting", "Requests that may wait; others get 429.")
    ] = 1024,
    max_connections: Annotated[
        int, _server("--max-connections", "Connections; others get 503.")
    ] = 4096,
    header_timeout: Annotated[
        float, _server("--header-timeout", "Seconds for the head of a request.")
    ] = 10.0,
    body_timeout: Annotated[
        float, _server("--body-timeout", "Seconds for the body of a request.")
    ] = 60.0,
    request_timeout: Annotated[
        float, _server("--request-timeout", "Seconds for an answer; 0 for no limit.")
    ] = 3600.0,
    drain_timeout: Annotated[
        float, _server("--drain-timeout", "Seconds for open answers after SIGTERM; 0 for no limit.")
    ] = 0.0,
    latency_class: Annotated[
        list[str] | None,
        _server(
            "--latency-class",
            "NAME=latency:2,first_token:0.5,token:0.05: bounds in seconds of requests with the "
            "header x-latency-class: NAME. Repeat it for more.",
        ),
    ] = None,
    adapter_folder: Annotated[
        Path | None,
        _server(
            "--adapter-folder", "Clients may load adapters from below this folder, and drop them."
        ),
    ] = None,
    max_adapters: Annotated[
        int | None,
        _server(
            "--max-adapters",
            f"Adapters at once; by default those of --adapter, and {_MORE_ADAPTERS} more with "
            "--adapter-folder.",
        ),
    ] = None,
    max_adapter_rank: Annotated[
        int | None,
        _server(
            "--max-adapter-rank",
            "Their largest rank; by default that of --adapter, or 16 without any.",
        ),
    ] = None,
    strict_fields: Annotated[
        bool,
        _server("--strict-fields", "Refuse fields of requests that have no effect here."),
    ] = False,
    template_kwargs: Annotated[
        str | None,
        _server(
            "--template-kwargs",
            "Variables of the chat template as JSON, for chats that do not set them, such as "
            "'{\"enable_thinking\": false}'.",
        ),
    ] = None,
    metrics_prefix: Annotated[
        str, _server("--metrics-prefix", 'First part of metrics\' names; "vllm" is usual too.')
    ] = "jaxserve",
    log_requests: Annotated[
        bool, _server("--log-requests/--no-log-requests", "A line of JSON for each request.")
    ] = True,
    log_prompts: Annotated[
        bool, _server("--log-prompts", "Write prompts to these lines too.")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        _server(
            "--otlp-traces-endpoint",
            "URL that gets a span of each request, of OpenTelemetry over HTTP.",
        ),
    ] = None,
    service_options: ServiceOptions,
    processes: ProcessOptions,
    journal: Annotated[
        Path | None, opt.journal("Keep conversations in this file; without it, in memory.")
    ] = None,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI.

    The server listens at once, and /ready says 503 until the model is loaded and compiled. SIGTERM
    or Ctrl-C lets accepted requests end; a second one ends at once.
    """
    with opt.exit_codes():
        try:
            from jaxserve import server
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "fastapi", "serve", "jaxserve serve") from error
        from jaxserve.core.sizes import parse_bytes

        server.check_names(served_name or model, service_options.adapters)
        options = server.ServerOptions(
            model_name=served_name or model,
            host=host,
            port=port,
            api_keys=_api_keys(api_key_file),
            allowed_origins=tuple(allowed_origin or ()),
            max_body_bytes=parse_bytes(max_body),
            max_prompt_tokens=max_prompt_tokens,
            max_samples=max_samples,
            max_waiting=max_waiting,
            max_connections=max_connections,
            header_timeout_s=header_timeout,
            body_timeout_s=body_timeout,
            request_timeout_s=request_timeout or None,
            drain_timeout_s=drain_timeout or None,
            latency_classes=server.parse_latency_classes(latency_class or ()),
            adapter_folder=adapter_folder,
            strict_fields=strict_fields,
            template_kwargs=opt.parsed_kwargs(template_kwargs) or {},
            metrics_prefix=metrics_prefix,
            log_requests=log_requests,
            log_prompts=log_prompts,
        )
        if not server.is_loopback(host) and not options.api_keys:
            typer.echo(
                f"warning: everyone who can reach {host}:{port} can use this server; pass "
                "--api-key-file, or --host 127.0.0.1",
                err=True,
            )

        room = _room(service_options, adapter_folder, max_adapters, max_adapter_rank)

        def open_service() -> Any:
            level = service_options.log_level or "info"
            service: Any = service_options.open(
                model, conversations=journal, log_level=level, **room
            )
            # A fleet has no outlook.
            return service, None if service_options.is_fleet else service.outlook

        if not processes.join():
            open_service()  # it follows the leader, and then exits
        listener = server.listen(options)
        address = server.url_of(host, listener.getsockname()[1])
        typer.echo(f"listening on {address}; loading {model}", err=True)
        with _signals_exit():
            is_closed = server.serve(
                options,
                open_service,
                listener=listener,
                traces=None if otlp_traces_endpoint is None else _traces(otlp_traces_endpoint),
                on_ready=lambda: announce_ready(address),
                on_drain=lambda num_open: typer.echo(
                    f"draining: {num_open} open requests go on, new ones are refused; a second "
                    "signal ends at once",
                    err=True,
                ),
            )
        if not is_closed:
            sys.stdout.flush()
            os._exit(0)  # Python's own exit would wait for what still runs


def _room(
    options: ServiceOptions, folder: Path | None, most: int | None, rank: int | None
) -> dict[str, int]:
    """Return the requested number and rank of adapters that the service has room for."""
    if folder is not None and not folder.is_dir():
        raise InvalidConfigError(f"--adapter-folder {folder} is no folder; pass one that exists")
    if folder is not None and most is None:
        most = len(options.adapters) + _MORE_ADAPTERS
    room = {"max_adapters": most, "max_adapter_rank": rank}
    given = {name: value for name, value in room.items() if value is not None}
    if given and options.is_fleet:
        raise InvalidConfigError(
            "--adapter-folder, --max-adapters and --max-adapter-rank are not allowed with "
            "--replicas or --roles: replicas on Ray load no adapters"
        )
    return given


def announce_ready(address: str) -> None:
    """Say that the server is ready, and exclude all loaded objects from garbage collection.

    A full collection that searches them stops all threads for half a second.
    """
    gc.collect()
    gc.freeze()
    typer.echo(f"ready on {address}", err=True)


@contextmanager
def _signals_exit() -> Iterator[None]:
    """Let signals end the process if the block does not handle them, also after the block.

    Only Python's own exit follows the block, which may take seconds. An error in the block restores
    the former handlers.
    """
    both = (signal.SIGINT, signal.SIGTERM)
    before = {sig: signal.signal(sig, lambda *_: os._exit(0)) for sig in both}
    try:
        yield
    except BaseException:
        for sig, handler in before.items():
            signal.signal(sig, handler)
        raise


def _traces(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from jaxserve.server.spans import provider_of
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            error.name or "opentelemetry", "otel", "--otlp-traces-endpoint"
        ) from error
    return provider_of(OTLPSpanExporter(endpoint=endpoint))


def _api_keys(path: Path | None) -> tuple[str, ...]:
    """Return the keys in a file, one per line, and the one in the environment."""
    keys = [os.environ[_KEY_VARIABLE]] if os.environ.get(_KEY_VARIABLE) else []
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfigError(
                f"--api-key-file {path} cannot be read: {error}; pass a text file with a key on "
                "each line"
            ) from error
        given = [line for line in lines if line and not line.startswith("#")]
        if not given:
            raise InvalidConfigError(
                f"--api-key-file {path} has no key; put one on each line, or omit the option"
            )
        keys += given
    return tuple(keys)
