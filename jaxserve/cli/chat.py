"""`jaxserve chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.options import (
    OF_MANY_REQUESTS,
    ProcessOptions,
    SamplingOptions,
    ServiceOptions,
    flat,
)
from jaxserve.core.errors import JaxserveError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.segment import Segment

    from jaxserve.conversations import Conversation
    from jaxserve.runtime import Service

_REFRESHES_PER_S = 8
_MAX_LINES = 1000  # of the history

HELP = (
    "/reset begins a new conversation, /exit leaves; Ctrl-C stops an answer, the next one leaves."
)


@flat(omit=OF_MANY_REQUESTS)
def chat(
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="System message to start with.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option("--id", help="Continue the conversation with this id, or begin one."),
    ] = None,
    journal: Annotated[
        Path | None,
        opt.journal("Keep the conversation in this file; with --id alone, in {default}."),
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown/--no-markdown", help="Render Markdown where stdout is a terminal."
        ),
    ] = True,
    history: Annotated[
        bool,
        typer.Option(
            "--history/--no-history",
            help="Keep the typed lines for later chats, readable by you alone, in "
            "~/.local/state/jaxserve/chat_history (or in $XDG_STATE_HOME).",
        ),
    ] = True,
    max_tokens: opt.MaxTokens = 512,
    sampling: SamplingOptions,
    model: opt.Model = opt.DEFAULT_MODEL,
    service_options: ServiceOptions,
    processes: ProcessOptions,
) -> None:
    """Chat with an instruct model. Answers are printed while they are generated.

    /reset begins a new conversation, /exit (or Ctrl-D) leaves. Ctrl-C stops an answer, which is
    then not kept; between answers it leaves.

    With --id or --journal the conversation is kept, and --id continues it later; see
    `jaxserve conversations`. Without either, of the conversation only the typed lines are written
    to a file, that of --history.
    """
    with opt.exit_codes():
        params = sampling.params(max_tokens=max_tokens, adapter=service_options.only_adapter)
        if id is not None and journal is None:
            journal = opt.made_journal()
        processes.join()
        with service_options.open(model, conversations=journal, max_slots=1) as service:
            typer.echo(f"{model}: {HELP}", err=True)
            keeps_lines = history and sys.stdin.isatty()
            with line_history(_history_path()) if keeps_lines else nullcontext():
                _converse(service, params, system, id, journal, _console() if markdown else None)


def _converse(
    service: Service,
    params: SamplingParams,
    system: str | None,
    id: str | None,
    journal: Path | None,
    console: Console | None,
) -> None:
    conversation = service.conversation(id, system=system)
    if conversation.turns:
        typer.echo(
            f"(conversation {conversation.id} continues after {len(conversation.turns)} turns and "
            f"{len(conversation.token_ids)} tokens)",
            err=True,
        )
    try:
        while (said := _ask()) is not None:
            if said == "/reset":
                conversation = service.conversation(system=system)
                typer.echo("(a new conversation)", err=True)
            elif said.startswith("/"):
                typer.echo(f"unknown command {said}; {HELP}", err=True)
            elif said:
                _answer(conversation, params, said, console)
    finally:
        if journal is not None and conversation.turns:
            again = shlex.join(["--journal", str(journal), "--id", conversation.id])
            typer.echo(f"(kept; continue with: jaxserve chat {again})", err=True)


def _ask() -> str | None:
    """Return the user's next line; None if the user leaves."""
    try:
        said = input("> ").strip()
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo()
        raise
    return None if said == "/exit" else said


def _answer(
    conversation: Conversation, params: SamplingParams, said: str, console: Console | None
) -> None:
    """Print the answer while it is generated; a turn that fails or is stopped is not kept."""
    try:
        # Closing the generator cancels an answer that is still being generated.
        with closing(conversation.stream(said, params)) as pieces, shown(console) as show:
            for piece in pieces:
                show(piece.text, piece.reasoning)
        if console is None:
            typer.echo()
    except KeyboardInterrupt:
        typer.echo(" (stopped, and not kept)")
    except JaxserveError as error:
        typer.echo(f"{opt.describe(error)} (/reset begins a new conversation)", err=True)


def _console() -> Console | None:
    """Return the terminal of stdout; None if there is none that can be drawn on."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal and not console.is_dumb_terminal else None


@contextmanager
def shown(console: Console | None) -> Iterator[Callable[..., None]]:
    """Yield a function that shows more of an answer, and of the thinking before it, dimmed.

    The answer is rendered on a console, or shown as it is. On a console, its end moves while it
    grows, and at the end all of it is printed.
    """
    if console is None:
        yield _Plain().add
        return
    from rich.live import Live

    answer = _Growing()
    try:
        with Live(answer, console=console, transient=True, refresh_per_second=_REFRESHES_PER_S):
            yield answer.add
    finally:
        console.print(answer.whole())


@final
class _Plain:
    """Prints an answer as it is, with an empty line after its thinking."""

    def __init__(self) -> None:
        self._is_thinking = False

    def add(self, text: str, reasoning: str = "") -> None:
        if reasoning:
            typer.secho(reasoning, dim=True, nl=False)
            self._is_thinking = True
        if text and self._is_thinking:
            typer.echo("\n")
            self._is_thinking = False
        typer.echo(text, nl=False)


@final
class _Growing:
    """An answer as Markdown, of which the last lines that fit on the screen are drawn."""

    def __init__(self) -> None:
        self._text = self._reasoning = ""

    def add(self, text: str, reasoning: str = "") -> None:
        self._text += text
        self._reasoning += reasoning

    def whole(self) -> Group:
        """Return the thinking, dimmed, and the answer."""
        from rich.console import Group
        from rich.markdown import Markdown
        from rich.text import Text

        thinking = [Text(f"{self._reasoning}\n", style="dim")] if self._reasoning else []
        return Group(*thinking, Markdown(self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        lines = console.render_lines(self.whole(), options.reset_height())
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def _history_path() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "jaxserve" / "chat_history"


@contextmanager
def line_history(path: Path) -> Iterator[None]:
    """Recall lines of earlier chats in the block, and keep those typed in it, for the user alone.

    Without GNU readline, or if the file cannot be used, lines are not kept; a warning says why.
    """
    try:
        import readline
    except ImportError:  # Windows has none
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.clear_history()
        if path.stat().st_size:
            readline.read_history_file(path)
        readline.set_history_length(_MAX_LINES)
    except OSError as error:
        _say_not_kept(error)
        yield
        return
    try:
        yield
    finally:
        try:
            readline.write_history_file(path)
            path.chmod(0o600)
        except OSError as error:
            _say_not_kept(error)


def _say_not_kept(error: OSError) -> None:
    typer.echo(f"typed lines are not kept: {error}; --no-history omits this", err=True)
