"""What tests of several commands share."""

from __future__ import annotations

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
    return CliRunner().invoke(app, [*line.split(), *more], input=given)


def assert_refused(done: Result, said: str, code: int = 2) -> None:
    """Check that a command ended with one message, without a traceback and without output."""
    assert done.exit_code == code, done.output
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr and done.stdout == ""
