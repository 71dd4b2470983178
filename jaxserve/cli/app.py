"""The application with all commands. Slow imports are inside the commands."""

from __future__ import annotations

import _thread
import atexit
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, cast, final

import typer
from typer.core import TyperGroup

from jaxserve.cli.options import EXIT_INTERRUPTED, EndsAtOnce
from jaxserve.core.gpus import reserve_memory

# Module and function, or group, of each command.
_HOMES = {
    "generate": ("generate", "generate"),
    "chat": ("chat", "chat"),
    "embed": ("embed", "embed"),
    "serve": ("serve", "serve"),
    "run-batch": ("run_batch", "run_batch"),
    "bench": ("bench", "bench"),
    "plan": ("plan", "plan"),
    "arena": ("arena", "arena_app"),
    "conversations": ("conversations", "conversations_app"),
    "models": ("models", "models_app"),
    "predictor": ("probe", "predictor_app"),  # with the group of `probe`
}


@final
class _Commands(Mapping[str, Any]):
    """The commands by name; the module of a command is imported when the command is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, attribute = _HOMES[name]
            found = getattr(import_module(f"jaxserve.cli.{module}"), attribute)
            home = typer.Typer()
            if isinstance(found, typer.Typer):
                home.add_typer(found, name=name)
            else:
                home.command(name)(found)
            self._made[name] = typer.main.get_group(home).commands[name]
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


@final
class _Root(TyperGroup):
    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands = cast(Any, _Commands())


app = typer.Typer(
    name="jaxserve",
    cls=_Root,
    help="A JAX-native inference runtime for generative language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from jaxserve import __version__

        typer.echo(f"jaxserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _interrupt_soon() -> None:
    time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def heed_interrupts() -> None:
    """Raise KeyboardInterrupt again, a moment later, where Python has dropped it.

    It drops errors of `gc.callbacks`, of which JAX has one, and of callbacks of weak references.
    Most interrupts arrive there while many objects are made
    (findings/jax_gc_callback_swallows_interrupts.sh).
    """
    show = sys.unraisablehook

    def heed(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            # It does not wait, in which the next interrupt would be dropped.
            _thread.start_new_thread(_interrupt_soon, ())
        else:
            show(dropped)

    sys.unraisablehook = heed


# New objects between two garbage collections. Python's own number, 700, makes 700 of them in a
# start, which free next to nothing.
_COLLECT_EVERY = 50_000


def _end_at_once(codes: list[int]) -> None:
    """End the process; Python would first free every object and each executable, one by one."""
    if not codes:  # an error, which Python reports
        return
    with suppress(OSError, ValueError):  # of a stream that is closed, which Python reports, too
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def main() -> None:
    """Entry point of the `jaxserve` script."""
    heed_interrupts()
    reserve_memory(os.environ)  # also for the processes that this one starts
    gc.set_threshold(_COLLECT_EVERY)
    codes: list[int] = []
    # What is registered first is called last, after the threads have ended.
    atexit.register(_end_at_once, codes)
    try:
        app()
    except EndsAtOnce:
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            codes.append(ended.code or 0)
        raise
