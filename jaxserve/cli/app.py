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
from contextlib import suppress
from typing import Annotated

import typer

from jaxserve.cli.arena import arena_app
from jaxserve.cli.bench import bench
from jaxserve.cli.chat import chat
from jaxserve.cli.conversations import conversations_app
from jaxserve.cli.embed import embed
from jaxserve.cli.generate import generate
from jaxserve.cli.models import models_app
from jaxserve.cli.options import EXIT_INTERRUPTED, EndsAtOnce
from jaxserve.cli.plan import plan
from jaxserve.cli.predictor import predictor_app
from jaxserve.cli.probe import probe_app
from jaxserve.cli.run_batch import run_batch
from jaxserve.cli.serve import serve
from jaxserve.core.gpus import reserve_memory

app = typer.Typer(
    name="jaxserve",
    help="A JAX-native inference runtime for generative language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(embed)
app.command()(serve)
app.command()(run_batch)
app.command()(bench)
app.command()(plan)
app.add_typer(arena_app, name="arena")
app.add_typer(conversations_app, name="conversations")
app.add_typer(models_app, name="models")
predictor_app.add_typer(probe_app, name="probe")
app.add_typer(predictor_app, name="predictor")


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
