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


def run(*arguments: str, given: str | None = None) -> Result:
    """Run a command in this process; `given` is its standard input."""
    return CliRunner().invoke(app, list(arguments), input=given)
