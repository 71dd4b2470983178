"""Clients that people use, tried against the server.

Each has a script here, which names its packages in the form of PEP 723. uv makes an environment
of them once, which it keeps in its cache; Node's package is installed by npm. A script gets the
address, the name of the model, and the folder of its tokenizer. It ends with an error if the client
does not see what it should.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.testing import write_chat_model
from tests.server.serving import NAME, chat_server
from tests.server.test_structured import TEMPLATES

pytestmark = pytest.mark.release

HERE = Path(__file__).parent
SCRIPTS = sorted(path.name for path in HERE.glob("*.py") if not path.name.startswith(("_", "test")))
NODE_PACKAGE = "openai@7.59.0"
# Seconds to import a client and to ask some dozens of answers.
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def url(tmp_path_factory: Any) -> Iterator[str]:
    with chat_server(tmp_path_factory.mktemp("models") / "chat", TEMPLATES["hermes"]) as url:
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return write_chat_model(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_client(url: str, folder: str, script: str):
    """All that the script asks through its client is answered, and understood by it."""
    uv = [sys.executable, "-m", "uv"]
    made = _run(*uv, "sync", "--script", str(HERE / script))
    assert "No solution found" not in made.stderr, made.stderr  # a version that is not there
    if made.returncode:
        pytest.skip(f"uv cannot install the packages of {script}: {made.stderr[-300:]}")
    ran = _run(*uv, "run", "--no-project", "--script", str(HERE / script), url, NAME, folder)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


def test_node(url: str, tmp_path: Path):
    """The same of OpenAI's client for Node."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed; install Node.js 20 or newer")
    made = _run(npm, "install", "--no-audit", "--no-fund", NODE_PACKAGE, at=tmp_path)
    assert "ETARGET" not in made.stderr, made.stderr  # a version that is not there
    if made.returncode:
        pytest.skip(f"npm cannot install {NODE_PACKAGE}: {made.stderr[-300:]}")
    ran = _run("node", str(HERE / "openai_node.mjs"), url, NAME, at=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]


def _run(*command: str, at: Path = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=TIMEOUT_S)
