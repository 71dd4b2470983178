"""Model folders that the tests of several commands share."""

from __future__ import annotations

import json

import pytest

from jaxserve.testing import write_chat_model
from tests.cli.common import TOKEN_CONFIG


@pytest.fixture(scope="package")
def model(tmp_path_factory) -> str:
    """A folder with a chat template and a tokenizer; weights are random."""
    return write_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def token_model(tmp_path_factory) -> str:
    """A folder with only a configuration: weights are random, and prompts are token ids."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TOKEN_CONFIG))
    return str(folder)
