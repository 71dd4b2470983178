"""`jaxserve models`, which lists the models that can be served and the paths of their files."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.cli import options as opt

models_app = typer.Typer(help="Fetch, list and describe models.", no_args_is_help=True)


@models_app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="A name from `jaxserve models list`, or org/name.")],
    quiet: opt.Quiet = False,
) -> None:
    """Download a model into the cache, and print its path."""
    with opt.exit_codes():
        from jaxserve.models import registry

        typer.echo(registry.pull(name, progress=not quiet))


@models_app.command("list")
def list_models() -> None:
    """List the registered models, and which of them are in the cache."""
    with opt.exit_codes():
        from rich.console import Console
        from rich.table import Table

        from jaxserve.models import registry

        table = Table("name", "in cache", "what it is", box=None, header_style="bold")
        for entry in registry.list_models():
            table.add_row(entry.name, "yes" if entry.file.is_cached else "no", entry.description)
        Console().print(table)


@models_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A name, org/name, a folder or a GGUF file.")],
) -> None:
    """Describe a model: architecture, sizes, path. Loads no weights."""
    with opt.exit_codes():
        from jaxserve.models import registry

        for key, value in registry.show(name).items():
            typer.echo(f"{key:<20} {value}")
