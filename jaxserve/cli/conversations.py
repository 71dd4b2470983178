"""`jaxserve conversations`, which manages the conversations in a journal without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import options as opt
from jaxserve.core.errors import InvalidConfigError, UnknownConversationError

if TYPE_CHECKING:
    from jaxserve.conversations import Journal, JournalEntry

conversations_app = typer.Typer(
    help="List, show, export and delete the conversations in a journal.",
    no_args_is_help=True,
)

Id = Annotated[str, typer.Argument(help="Id of a conversation; see `jaxserve conversations list`.")]


@conversations_app.command("list")
def list_conversations(journal: opt.Journal = None) -> None:
    """List conversations, the most recently used first."""
    with opt.exit_codes(), _opened(journal) as kept:
        from rich.console import Console
        from rich.table import Table

        table = Table("id", "turns", "tokens", "last used", box=None, header_style="bold")
        for entry in kept.list():
            table.add_row(
                entry.id, str(entry.num_turns), str(entry.num_tokens), _moment(entry.used_s)
            )
        Console().print(table)


@conversations_app.command("show")
def show(id: Id, journal: opt.Journal = None) -> None:
    """Print the messages of a conversation."""
    with opt.exit_codes(), _opened(journal) as kept:
        entry = _found(kept, id)
        for message in kept.history(entry).messages:
            typer.echo(f"{message.get('role')}: {message.get('content')}\n")


@conversations_app.command("export")
def export(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of conversations; all of them by default.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also write each turn's token ids.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here, not to stdout.")
    ] = None,
    journal: opt.Journal = None,
) -> None:
    """Write conversations as JSON lines: id, times and messages, as `messages=` takes them."""
    with opt.exit_codes(), _opened(journal) as kept:
        entries = [_found(kept, id) for id in ids] if ids else kept.list()
        lines = (json.dumps(_exported(kept, e, tokens), ensure_ascii=False) for e in entries)
        if output is None:
            for line in lines:
                typer.echo(line)
            return
        try:
            with output.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise InvalidConfigError(
                f"cannot write --output {output}: {error}; name a file in a folder that exists"
            ) from error


@conversations_app.command("delete")
def delete(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of conversations.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Delete every conversation.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    journal: opt.Journal = None,
) -> None:
    """Delete conversations, and every copy of them in the journal's files."""
    with opt.exit_codes(), _opened(journal) as kept:
        if bool(ids) == all:
            raise InvalidConfigError("pass the ids of conversations or --all, not both")
        gone = ids or [entry.id for entry in kept.list()]
        question = f"Delete {len(gone)} conversation(s) permanently?"
        if gone and (yes or typer.confirm(question, err=True)):
            kept.delete(*dict.fromkeys(gone))
            typer.echo(f"deleted {len(gone)} conversation(s)", err=True)


@contextmanager
def _opened(path: Path | None) -> Iterator[Journal]:
    from jaxserve.conversations import Journal

    with closing(Journal(path or opt.default_journal(), must_exist=True)) as journal:
        yield journal


def _found(journal: Journal, id: str) -> JournalEntry:
    entry = journal.find(id)
    if entry is None:
        raise UnknownConversationError(
            f"no conversation {id!r} in the journal {journal.where}; see `jaxserve conversations "
            "list`"
        )
    return entry


def _exported(journal: Journal, entry: JournalEntry, tokens: bool) -> dict[str, Any]:
    history = journal.history(entry)
    record: dict[str, Any] = {
        "id": entry.id,
        "created": _moment(entry.created_s),
        "used": _moment(entry.used_s),
        "messages": history.messages,
    }
    if tokens:
        record["vocabulary"] = entry.vocabulary
        record["turns"] = [
            {
                "num_kept": turn.num_kept,
                "prompt_token_ids": turn.prompt,
                "answer_token_ids": turn.answer,
                "finish_reason": turn.finish_reason,
            }
            for turn in history.turns
        ]
    return record


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat(sep=" ", timespec="seconds")
