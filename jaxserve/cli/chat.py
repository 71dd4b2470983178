"""`jaxserve chat`: a conversation in the terminal."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from jaxserve.conversations import Conversation
    from jaxserve.runtime import Service

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
    `jaxserve conversations`. Without either, the conversation is not written to a file.
    """
    with opt.exit_codes():
        params = sampling.params(max_tokens=max_tokens, adapter=service_options.only_adapter)
        if id is not None and journal is None:
            journal = opt.made_journal()
        processes.join()
        with service_options.open(model, conversations=journal, max_slots=1) as service:
            typer.echo(f"{model}: {HELP}", err=True)
            _converse(service, params, system, id, journal)


def _converse(
    service: Service,
    params: SamplingParams,
    system: str | None,
    id: str | None,
    journal: Path | None,
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
                _answer(conversation, params, said)
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


def _answer(conversation: Conversation, params: SamplingParams, said: str) -> None:
    """Print the answer while it is generated; a turn that fails or is stopped is not kept."""
    try:
        # Closing the generator cancels an answer that is still being generated.
        with closing(conversation.stream(said, params)) as pieces:
            for piece in pieces:
                typer.echo(piece.text, nl=False)
        typer.echo()
    except KeyboardInterrupt:
        typer.echo(" (stopped, and not kept)")
    except JaxserveError as error:
        typer.echo(f"{opt.describe(error)} (/reset begins a new conversation)", err=True)
