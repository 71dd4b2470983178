"""What tests of several commands share."""

from __future__ import annotations

from copy import copy
from functools import cache

from typer import Typer
from typer.testing import CliRunner, Result

from jaxserve.cli import app

TOKEN_CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


# Options of commands that answer with a tiny model.
SMALL = "--load random --max-slots 1 --max-context 64 --quiet"


def run(line: str, *more: str, given: str | None = None) -> Result:
    """Run a line in this process, with `more` arguments; `given` is its standard input."""
    words = [*line.split(), *more]
    names_a_command = not words[0].startswith("-")
    return CliRunner().invoke(_with_only(words[0]) if names_a_command else app, words, input=given)


@cache
def _with_only(name: str) -> Typer:
    """Return the application without other commands, as each call builds all that there are."""
    own = copy(app)
    own.registered_groups = [each for each in app.registered_groups if each.name == name]
    own.registered_commands = [
        each
        for each in app.registered_commands
        if each.callback is not None and each.callback.__name__.replace("_", "-") == name
    ]
    return own


def assert_refused(done: Result, said: str, code: int = 2) -> None:
    """Check that a command ended with one message, without a traceback and without output."""
    assert done.exit_code == code, done.output
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr and done.stdout == ""
